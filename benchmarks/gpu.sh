#!/usr/bin/env bash
# Everything that needs a GPU, with one command: a profile of decoding and training at the shapes of Qwen2.5-1.5B, the
# tests that need a GPU, decoding at the shapes of 0.5B, 1.5B and 7B against transformers' engines and the bandwidth
# floor, a GRPO step of 1.5B and TRL's, a plan against the memory that the run takes, and the quickstarts,
# the letters and (`real`, see gpu_quickstart.sh) SmolLM2-135M-Instruct.
#
#   bash benchmarks/gpu.sh                      all parts, on the first GPU of this machine
#   bash benchmarks/gpu.sh profile              this part: one process, a minute on an H200; see gpu_profile.py
#   bash benchmarks/gpu.sh decode_7b plan       these parts
#   bash benchmarks/gpu.sh --list               the names of all parts
#   bash benchmarks/gpu.sh --toy --out FOLDER   every part at toy sizes on the CPU: shows that the script runs
#
# SKIP_SETUP=1 takes the environment as it is and needs no network, but for the part trl_environment; gpu_pack.sh makes
# a folder with what a machine without network lacks.
#
# Every part is stopped after ten minutes. If a part fails, the others still run, and the script fails at its end.
# Started again it skips the parts done on this commit and machine; --again repeats them. After each part it writes
# gpu.json and gpu.md (a table) to benchmarks/results, or to the folder after --out, with logs in gpu/. TRL_ENV is the
# folder of TRL's environment, which is created if it does not exist.
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/setup.sh

toy="" again="" list="" out=benchmarks/results wanted=()
while [ $# -gt 0 ]; do
    case $1 in
    --toy) toy=1 out="" ;;
    --again) again=1 ;;
    --list) list=1 ;;
    --out) out=${2:-} && shift ;;
    --*)
        echo "gpu.sh: $1 is no option; there are --toy, --again, --list and --out FOLDER" >&2
        exit 2
        ;;
    *) wanted+=("$1") ;;
    esac
    shift
done
if [ -z "$out$list" ]; then
    echo "gpu.sh: --toy needs --out FOLDER behind it: its numbers are not a GPU's" >&2
    exit 2
fi

prepare() { # the environment, and the names of machine and commit
    setup dev
    mkdir -p "$out/gpu"
    out=$(realpath "$out")
    work=$out/gpu
    if ! command -v python >/dev/null; then
        # The scripts of the parts call it so.
        mkdir -p "$work/bin"
        printf '#!/bin/sh\nexec python3 "$@"\n' >"$work/bin/python"
        chmod +x "$work/bin/python"
        export PATH=$work/bin:$PATH
    fi
    if [ -n "$toy" ]; then
        export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES="" MACHINE="cpu, toy sizes"
    else
        # Without a device the tests would be skipped, and the rest would run on the CPU.
        python -c 'import torch; torch.cuda.is_available() or exit("gpu.sh: torch finds no CUDA device")'
        CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
        export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
        MACHINE=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader \
            -i "$CUDA_VISIBLE_DEVICES") || MACHINE=$(python -c 'import torch; print(torch.cuda.get_device_name())')
        export MACHINE PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
    fi
    # A folder of gpu_pack.sh has no history, but a file.
    COMMIT=$(cat COMMIT 2>/dev/null || git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
    local changes
    changes=$(git diff HEAD -- . ':!benchmarks/results' 2>/dev/null || true)
    if [ -n "$changes" ]; then COMMIT="$COMMIT with changes $(cksum <<<"$changes" | cut -d' ' -f1)"; fi
    export COMMIT
    # The package need not be installed.
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
}

export TRL_ENV=${TRL_ENV:-$HOME/.cache/hybrid_grpo/trl}
work="" limit=${LIMIT_S:-600} failed=() known=()
if [ -z "$list" ]; then prepare; fi
results() { python benchmarks/gpu_results.py "$out" "$@"; }

part() { # NAME COMMAND...: the command writes its numbers to a file of that name in $work
    local name=$1 start=$SECONDS
    shift
    known+=("$name")
    if [ -n "$list" ]; then return; fi
    if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
    if [ -z "$again" ] && results has "$name"; then
        echo "== $name: done before"
        return
    fi
    echo "== $name"
    rm -f "$work/$name".json "$work/$name".xml
    if timeout --kill-after=30 "$limit" "$@" 2>&1 | tee "$work/$name.log"; then
        results add "$name" $((SECONDS - start))
    else
        if [ $((SECONDS - start)) -ge "$limit" ]; then echo "stopped after $limit s" | tee -a "$work/$name.log"; fi
        results fail "$name"
        failed+=("$name")
    fi
}

part profile python benchmarks/gpu_profile.py ${toy:+--toy} --json "$work/profile.json"
# Most of the time of tests goes into compiling kernels, on one core.
several=$(python -c 'import os, importlib.util as u
if u.find_spec("xdist"): print("-n", min(16, os.cpu_count()), "--dist worksteal")' 2>/dev/null || true)
step=(python benchmarks/step.py --trl-python "$TRL_ENV/bin/python")
mapfile -t tests < <(grep -lE 'mark\.gpu\b' tests/*.py tests/*/*.py tests/*/*/*.py)
# shellcheck disable=SC2086
part tests python -m pytest -m gpu -v -rs $several -p no:cacheprovider --junitxml="$work/tests.xml" "${tests[@]}"
# Not on a CPU, where the kernels are interpreted, as in the other tests.
if [ -z "$toy" ]; then
    # shellcheck disable=SC2086
    part kernels python -m pytest -q $several -p no:cacheprovider --junitxml="$work/kernels.xml" \
        tests/model/kernels/gpu tests/generation/test_gpu_step.py
fi
if [ -n "$toy" ]; then
    part decode_tiny python benchmarks/rollout.py --workload toy --repeats 1 --threads 1 \
        --engines hybrid,generate,generate_batch --json "$work/decode_tiny.json"
    part step "${step[@]}" --workload toy --sides hybrid-zero2,hybrid-zero3 --repeats 1 --threads 1 --json "$work/step.json"
    part trl "${step[@]}" --workload toy --sides trl --repeats 1 --threads 1 --json "$work/trl.json"
    part plan python benchmarks/plan.py letters --json "$work/plan.json"
else
    for model in 0.5b 1.5b 7b; do
        part decode_$model python benchmarks/rollout.py --workload gpu_ragged --model $model --alone --repeats 2 \
            --engines hybrid,generate,generate_batch --json "$work/decode_$model.json"
    done
    part step "${step[@]}" --workload gpu_1.5b --sides hybrid-zero2,hybrid-zero3 --repeats 3 --json "$work/step.json"
    part trl_environment bash benchmarks/trl_env.sh "$TRL_ENV"
    part trl "${step[@]}" --workload gpu_1.5b --sides trl --repeats 2 --json "$work/trl.json"
    part plan python benchmarks/plan.py gpu --json "$work/plan.json"
fi
part quickstart bash benchmarks/gpu_quickstart.sh letters "$work/runs" "$toy" "$work/quickstart.json"
if [ -z "$toy" ]; then part real bash benchmarks/gpu_quickstart.sh real "$work/runs" "" "$work/real.json"; fi

if [ -n "$list" ]; then
    printf '%s\n' "${known[@]}"
    exit
fi
parts=${known[*]}
for name in "${wanted[@]}"; do
    if [[ " $parts " != *" $name "* ]]; then
        echo "gpu.sh: there is no part $name, only ${parts// /, }" >&2
        failed+=("$name")
    fi
done
results table
if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu.sh: failed: ${failed[*]}; logs are in $work" >&2
    exit 1
fi
