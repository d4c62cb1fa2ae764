#!/usr/bin/env bash
# From nothing to a language model improved by GRPO, in minutes, on all GPUs or on two CPU ranks.
#
#   bash training_scripts/quickstart.sh
#       creates a tiny model and a task (sorting letters), trains it on supervised pairs, then by GRPO.
#   bash training_scripts/quickstart.sh --policy.model PATH --data.path FILE --rewards '[{function: exact_match}]' ...
#       the same GRPO command on your own model and data; `hybrid-grpo train --help` lists every setting.
#
# With --run.resume auto either continues where it stopped. With --run.name another run starts from the warm-up that is
# there, and all others stay. SEED (0) seeds everything; RUNS (runs) is where results go.
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/launch.sh
setup

seed=${SEED:-0}
begin quickstart "$@"
case " $* " in
*" --policy.model"*)
    launch train --run.dir "$runs" --run.name quickstart --run.seed "$seed" "$@"
    exit
    ;;
esac

export ROWS=64 # per step, in the recipes below
if [ ! -e "$runs/quickstart-sft/model" ]; then
    echo "quickstart: a tiny model and its task"
    python training_scripts/quickstart_task.py "$runs/quickstart-task" --seed "$seed"
    echo "quickstart: supervised warm-up"
    launch sft --config training_scripts/quickstart_sft.yaml --run.dir "$runs" --run.seed "$seed" --run.resume auto \
        --policy.model "$runs/quickstart-task/model" --data.path "$runs/quickstart-task/sft.jsonl"
fi
echo "quickstart: GRPO"
launch train --config training_scripts/quickstart.yaml --run.dir "$runs" --run.seed "$seed" \
    --policy.model "$runs/quickstart-sft/model" --data.path "$runs/quickstart-task/train.jsonl" \
    --data.eval_path "$runs/quickstart-task/heldout.jsonl" "$@"
