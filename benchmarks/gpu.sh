#!/usr/bin/env bash
# Everything that needs a GPU, with one command: the tests marked so, rollouts of the engines against each other, and
# the quickstart on every GPU found. A part that fails does not stop the next; the script then fails at its end.
# Leaves rollout_gpu.json in benchmarks/results/, logs and the quickstart's metrics in benchmarks/results/gpu/.
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/setup.sh
setup dev
# Without a device the tests would be skipped, and the rest would run on the CPU.
python -c 'import torch; torch.cuda.is_available() or exit("gpu.sh: torch finds no CUDA device")'

results=benchmarks/results
out=$results/gpu
mkdir -p "$out"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv >"$out/machine.csv"

failed=()
part() { # NAME COMMAND...
    local name=$1
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$out/$name.log" || failed+=("$name")
}

rollouts() { # MODEL ENGINES
    part "rollout_$1" python benchmarks/rollout.py --workload gpu_ragged --model "$1" --engines "$2" \
        --json "$results/rollout_gpu.json"
}

part tests python -m pytest -m gpu -v -rs
# A file holds the results of one machine; this may be another.
rm -f "$results/rollout_gpu.json"
# The weights are there once for every engine. HybridEngineRollout decodes everything to the limit: shown once.
rollouts 0.5b hybrid,generate,generate_batch,deepspeed
rollouts 1.5b hybrid,generate,generate_batch
rollouts 7b hybrid,generate,generate_batch
part quickstart env RUNS="$out/runs" bash training_scripts/quickstart.sh
if [ -e "$out/runs/quickstart/metrics.jsonl" ]; then
    cp "$out/runs/quickstart/metrics.jsonl" "$out/quickstart_metrics.jsonl"
fi

if [ ${#failed[@]} -gt 0 ]; then
    echo "gpu.sh: failed: ${failed[*]}; logs are in $out" >&2
    exit 1
fi
