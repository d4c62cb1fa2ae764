#!/usr/bin/env bash
# A tiny model that sees, improved by GRPO in minutes, on all GPUs or on two CPU ranks.
#
#   bash training_scripts/pictures.sh
#       draws shapes and bars, makes a tiny model of Qwen3-VL's kind, trains it on supervised pairs, then by GRPO.
#
# Further settings go to the GRPO run; with --run.resume auto it continues where it stopped. SEED (0) seeds everything;
# RUNS (runs) is where results go.
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/launch.sh
setup pictures

seed=${SEED:-0}
export ROWS=64 # per step, in the recipes below
begin pictures "$@"
if [ ! -e "$runs/pictures-sft/model" ]; then
    echo "pictures: a tiny model that sees, and its task"
    python training_scripts/pictures_task.py "$runs/pictures-task" --seed "$seed"
    echo "pictures: supervised warm-up"
    launch sft --config training_scripts/pictures_sft.yaml --run.dir "$runs" --run.seed "$seed" --run.resume auto \
        --policy.model "$runs/pictures-task/model" --data.path "$runs/pictures-task/sft.jsonl"
fi
echo "pictures: GRPO"
launch train --config training_scripts/pictures.yaml --run.dir "$runs" --run.seed "$seed" \
    --policy.model "$runs/pictures-sft/model" --data.path "$runs/pictures-task/train.jsonl" \
    --data.eval_path "$runs/pictures-task/heldout.jsonl" "$@"
