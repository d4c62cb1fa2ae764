#!/usr/bin/env bash
# Lint, types, layers and tests, in an environment of its own where none is active.
#
#   bash tests/run.sh              all tests, but of the longest (tests/long.txt) a few cases each, always the same
#   bash tests/run.sh --all        all cases
#   bash tests/run.sh --fast       without the longest, and without those that start processes
#   bash tests/run.sh -k sampler   other arguments go to pytest
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/setup.sh
setup dev
# The tests of its tasks are left out without it; its requirements, for its own programs, are many.
[ -n "${SKIP_SETUP:-}" ] || python -c 'import bfcl_eval' 2>/dev/null || python -m pip install --quiet --no-deps bfcl-eval || true
export DS_ACCELERATOR=${DS_ACCELERATOR:-$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}
# Each worker imports all tests, which takes a second the first time and ten where their bytecode may not be kept.
unset PYTHONDONTWRITEBYTECODE
# The workers share the cores.
export OMP_NUM_THREADS=1
tests=() fast=
case "${1:-}" in
    "") tests=(--long few) ;;
    --all) shift ;;
    --fast) shift; fast=1; tests=(--long none -m "not (ranks or process or gpu)") ;;
esac
ruff check .
ruff format --check .
mypy &
types=$!
lint-imports || { wait; exit 1; }
wait "$types"
# More workers than cores, if these are few: many tests wait for processes of theirs, or for a time to pass. The fast
# ones do not, and each worker imports everything.
cores=$(getconf _NPROCESSORS_ONLN)
workers=$((cores < 2 ? 2 : cores < 4 && ${fast:-0} ? cores : 4))
# Files stay whole, as most that start processes share them among their tests; conftest.py says in which order. A worker
# that crashes is not replaced: another would run the same test.
python -m pytest -q -n "$workers" --dist loadfile --no-loadscope-reorder --max-worker-restart 0 "${tests[@]}" "$@"
