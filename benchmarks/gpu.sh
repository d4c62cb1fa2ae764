#!/usr/bin/env bash
# Everything that needs a GPU, with one command: a profile of decoding and training at the shapes of Qwen2.5-1.5B, a GRPO
# step of 1.5B three ways and TRL's, two ranks on one GPU, the tests that need a GPU, decoding at the shapes of 0.5B, 1.5B
# and 7B against transformers' engines and the bandwidth floor, the quickstarts, the letters and (`real`)
# SmolLM2-135M-Instruct, and a plan against the memory that the run takes.
#
#   bash benchmarks/gpu.sh                      all parts, on the first GPU of this machine
#   bash benchmarks/gpu.sh profile              this part: one process, a minute on an H200; see gpu_profile.py
#   bash benchmarks/gpu.sh decode_7b plan       these parts
#   bash benchmarks/gpu.sh lease_a              the parts of a lease (below); then lease_b, on the machine as it is
#   bash benchmarks/gpu.sh --list               the names of all parts
#   bash benchmarks/gpu.sh --toy --out FOLDER   every part at toy sizes on the CPU: shows that the script runs
#
# SKIP_SETUP=1 takes the environment as it is and needs no network, but for the part trl_environment. In a folder that
# gpu_pack.sh has made it installs the wheels there instead, and joins the weights of `real`.
#
# Every part is stopped after ten minutes. If a part fails, the others still run, and the script fails at its end.
# Started again it skips the parts done on this commit and machine; --again repeats them. After each part it writes
# gpu.json and gpu.md (a table) to benchmarks/results, or to the folder after --out, with logs in gpu/. lease_a and
# lease_b together take a quarter of an hour. A lease gives each part the seconds below and whatever earlier parts left
# over, ends after LEASE_S seconds (their sum and 30) with what is done, and after each part writes all of this to
# lease_a.tar.gz in the folder OUT, else in that of --out. TRL runs in TRL_ENV, the folder of an environment which is
# created if it does not exist, or here, where its package is.
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/setup.sh

declare -A leases=(
    [lease_a]="profile=105 tests=120 step_zero2=80 ranks=150"
    [lease_b]="step_stored=70 real=120 trl=85"
    [lease_c]="peers=245 step_zero3=85 quickstart=130 plan=100"
)
declare -A seconds=()
toy="" again="" list="" out=benchmarks/results lease="" deadline=30 wanted=() pack=${PWD%/*}
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
    lease_[abc]) lease=$1 ;;
    *) wanted+=("$1") ;;
    esac
    shift
done
if [ -n "$lease" ] && [ ${#wanted[@]} -gt 0 ]; then
    echo "gpu.sh: $lease has its own parts: leave out ${wanted[*]}" >&2
    exit 2
fi
if [ -z "$out$list" ]; then
    echo "gpu.sh: --toy needs --out FOLDER behind it: its numbers are not a GPU's" >&2
    exit 2
fi
for limited in ${lease:+${leases[$lease]}}; do
    # Toy sizes are for any machine, however busy.
    wanted+=("${limited%=*}") seconds[${limited%=*}]=$((${limited#*=} * (${toy:-0} * 9 + 1)))
    deadline=$((deadline + ${seconds[${limited%=*}]}))
done
deadline=${LEASE_S:-$deadline}

unpack() { # the wheels, and the file of weights, which stands where quickstart.sh would put it
    local cache=${HYBRID_GRPO_CACHE:-$HOME/.cache/hybrid_grpo} name=SmolLM2-135M-Instruct.Q4_1.gguf
    if [ -z "${SKIP_SETUP:-}" ]; then
        python3 -m pip install --quiet --no-index --no-deps --no-compile "${pack%/*}"/*/wheels/*.whl
    fi
    PATH=$(python3 -c 'import sys; print(sys.prefix)')/bin:$PATH
    export PATH SKIP_SETUP=1 ROWS_OF_REAL=$pack/rows
    if [ -e "$cache/$name" ] || ! compgen -G "${pack%/*}/weights_*" >/dev/null; then return; fi
    mkdir -p "$cache"
    cat "${pack%/*}"/weights_*/half >"$cache/joined"
    if sha256sum --check --status <<<"$(cat "$pack/weights.sha256")  $cache/joined"; then
        mv "$cache/joined" "$cache/$name"
    else
        echo "gpu.sh: the weights of real are not whole: a half is missing, or damaged" >&2
    fi
}

prepare() { # the environment, and the names of machine and commit
    if [ -d "$pack/wheels" ]; then unpack; else setup dev; fi
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

TRL_ENV=${TRL_ENV:-$HOME/.cache/hybrid_grpo/trl} trl_python=$TRL_ENV/bin/python
work="" failed=() known=()
if [ -z "$list" ]; then
    prepare
    due=$SECONDS
    if python -c 'import trl' 2>/dev/null; then trl_python=$(command -v python); fi
fi
results() { python benchmarks/gpu_results.py "$out" "$@"; }

part() { # NAME COMMAND...: the command writes its numbers to a file of that name in $work
    local name=$1 start=$SECONDS limit=600 log=$work/$1.log
    shift
    known+=("$name")
    if [ -n "$list" ]; then return; fi
    if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
    if [ -z "$again" ] && results has "$name"; then
        echo "== $name: done before"
        return
    fi
    if [ -n "$lease" ]; then
        due=$((due + ${seconds[$name]}))
        limit=$(((due < deadline - 10 ? due : deadline - 10) - SECONDS))
    fi
    if [ "$limit" -lt 20 ]; then
        echo "== $name: no time is left for it"
        failed+=("$name")
        return
    fi
    echo "== $name"
    rm -f "$work/$name".json "$work/$name".xml
    : >"$log"
    timeout --kill-after=5 "$limit" "$@" >>"$log" 2>&1 &
    # Not a pipe, which a process that outlives the part would keep open.
    tail --lines=+1 --follow --sleep-interval=0.2 --pid=$! "$log" || true
    if wait $!; then
        results add "$name" $((SECONDS - start))
    else
        if [ $((SECONDS - start)) -ge "$limit" ]; then echo "stopped after $limit s" | tee -a "$log"; fi
        results fail "$name" || true
        failed+=("$name")
    fi
    if [ -n "$lease" ]; then
        # Runs too, without their weights. A process that outlives its part may still write.
        tar -czf "${OUT:-$out}/$lease.tar.gz" -C "$out" --exclude=gpu/bin --exclude='*task' --exclude=checkpoints \
            --exclude='*.safetensors' gpu.json gpu.md gpu || true
    fi
}

part profile python benchmarks/gpu_profile.py ${toy:+--toy} --json "$work/profile.json"
if [ -n "$toy" ]; then case=letters step=(--workload toy --threads 1); else case=gpu step=(--workload gpu_1.5b); fi
step=(python benchmarks/step.py --trl-python "$trl_python" "${step[@]}" --repeats $((toy ? 1 : 3)))
# Most of the time of tests goes into compiling kernels, on one core.
several=$(python -c 'import os, importlib.util as u
if u.find_spec("xdist"): print("-n", min(16, os.cpu_count()), "--dist worksteal")' 2>/dev/null || true)
mapfile -t tests < <(grep -lE 'mark\.gpu\b' tests/*.py tests/*/*.py tests/*/*/*.py)
# shellcheck disable=SC2086
part tests python -m pytest -m gpu -v -rs $several -p no:cacheprovider --junitxml="$work/tests.xml" "${tests[@]}"
part step_zero2 "${step[@]}" --sides hybrid-zero2 --json "$work/step_zero2.json"
part step_zero3 "${step[@]}" --sides hybrid-zero3 --json "$work/step_zero3.json"
part step_stored "${step[@]}" --sides hybrid-zero2 --policy.gradient_checkpointing false --json "$work/step_stored.json"
part peers python benchmarks/gpu_profile.py peers ${toy:+--toy} --json "$work/peers.json"
part ranks python benchmarks/gpu_ranks.py "$work/runs/ranks" ${toy:+--toy} --json "$work/ranks.json"
part quickstart bash benchmarks/gpu_quickstart.sh letters "$work/runs" "$toy" "$work/quickstart.json"
if [ -n "$toy" ]; then
    part decode_tiny python benchmarks/rollout.py --workload toy --repeats 1 --threads 1 \
        --engines hybrid,generate,generate_batch --json "$work/decode_tiny.json"
else
    part real bash benchmarks/gpu_quickstart.sh real "$work/runs" "" "$work/real.json"
    # Not on a CPU, where the kernels are interpreted, as in the other tests.
    # shellcheck disable=SC2086
    part kernels python -m pytest -q $several -p no:cacheprovider --junitxml="$work/kernels.xml" \
        tests/model/kernels/gpu tests/generation/test_gpu_step.py
    for model in 0.5b 1.5b 7b; do
        part decode_$model python benchmarks/rollout.py --workload gpu_ragged --model $model --alone --repeats 2 \
            --engines hybrid,generate,generate_batch --json "$work/decode_$model.json"
    done
    part decode_peers python benchmarks/rollout.py --workload nano_vllm --model qwen3-0.6b --alone --repeats 2 \
        --engines hybrid,generate_batch --json "$work/decode_peers.json"
    if [[ $trl_python == "$TRL_ENV"/* ]]; then part trl_environment bash benchmarks/trl_env.sh "$TRL_ENV"; fi
fi
part trl "${step[@]}" --sides trl --repeats 1 --json "$work/trl.json"
part plan python benchmarks/plan.py "$case" --json "$work/plan.json"

if [ -n "$list" ]; then
    printf '%s\n' "${known[@]}"
    exit
fi
parts=${known[*]}
for name in "${wanted[@]}"; do
    if [[ -z "$lease" && " $parts " != *" $name "* ]]; then
        echo "gpu.sh: there is no part $name, only ${parts// /, }" >&2
        failed+=("$name")
    fi
done
results table
if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu.sh: failed: ${failed[*]}; logs are in $work" >&2
    exit 1
fi
