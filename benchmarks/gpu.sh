#!/usr/bin/env bash
# Everything that needs a GPU, with one command: the tests marked so, then the quickstart on every GPU found.
# Leaves logs and the quickstart's metrics in benchmarks/results/gpu/.
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/setup.sh
setup dev
out=benchmarks/results/gpu
mkdir -p "$out"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv >"$out/machine.csv"
python -m pytest -m gpu -v 2>&1 | tee "$out/tests.log"
RUNS="$out/runs" bash training_scripts/quickstart.sh 2>&1 | tee "$out/quickstart.log"
cp "$out/runs/quickstart/metrics.jsonl" "$out/quickstart_metrics.jsonl"
