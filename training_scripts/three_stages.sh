#!/usr/bin/env bash
# All stages of post-training, on generated data: supervised warm-up, a reward model from noisy preferences, and GRPO
# against that reward model, with the true score evaluated on held-out prompts. docs/three-stages.md explains each.
#
#   bash training_scripts/three_stages.sh [settings of the last stage, as in --run.steps 500 --grpo.beta 0.05]
#
# Every stage has a run folder in runs/three-stages, next to summary.json. With --run.resume auto the script continues
# where it stopped. SEED (0) seeds everything; RUNS (runs) is where results go.
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/launch.sh
setup

place=${RUNS:-runs}/three-stages seed=${SEED:-0}
resumes "$@" || set_aside "$place"
mkdir -p "$place"

timed() { # NAME COMMAND...: run it and append its seconds to seconds.txt
    local name=$1 start=$SECONDS
    echo "three stages: $name"
    "${@:2}"
    echo "$name $((SECONDS - start))" >>"$place/seconds.txt"
}
stage() { # sft|reward|train RECIPE [settings]: run it in the folder of that name
    timed "$1" launch "$1" --config "training_scripts/$2" --run.dir "$place" --run.name "$1" --run.seed "$seed" "${@:3}"
}
compare() { # eight answers of the warmed-up model to each prompt become pairs
    python -m hybrid_grpo generate --policy.model "$place/sft/model" --policy.dtype float32 --run.seed "$seed" \
        --data.path "$place/task/sft.jsonl" --rollout.num_generations 8 --rollout.temperature 1.3 \
        --rollout.max_completion_tokens 8 --generate.output "$place/samples.jsonl"
    python training_scripts/three_stages_pairs.py "$place/samples.jsonl" "$place/pairs" --seed "$seed"
}

if [ ! -e "$place/sft/model" ]; then
    timed task python training_scripts/quickstart_task.py "$place/task" --seed "$seed"
    stage sft quickstart_sft.yaml --run.steps 60 --run.resume auto \
        --policy.model "$place/task/model" --data.path "$place/task/sft.jsonl"
fi
if [ ! -e "$place/pairs/train.jsonl" ]; then timed pairs compare; fi
if [ ! -e "$place/reward/model" ]; then
    stage reward three_stages_reward.yaml --run.resume auto \
        --policy.model "$place/sft/model" --data.path "$place/pairs/train.jsonl" \
        --data.eval_path "$place/pairs/heldout.jsonl"
fi
stage train three_stages_train.yaml \
    --policy.model "$place/sft/model" --data.path "$place/task/train.jsonl" \
    --data.eval_path "$place/task/heldout.jsonl" \
    --rewards "[{function: reward_model, kwargs: {model: '$place/reward/model'}}]" "$@"
python training_scripts/three_stages_summary.py "$place"
