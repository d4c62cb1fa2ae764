#!/usr/bin/env bash
# Quickstarts as parts of gpu.sh: bash benchmarks/gpu_quickstart.sh letters|real RUNS TOY JSON
# `real` takes the weights from the file WEIGHTS, or joins its parts (`split -n 2 FILE FILE.`), for a machine without
# network. If TOY is not empty: a step of the letters on one rank, from the model before the supervised warm-up.
set -euo pipefail
cd "$(dirname "$0")/.."
task=$1 runs=$2 toy=$3 json=$4 start=$SECONDS
export RUNS=$runs
run=$runs/$task
if [ -n "$toy" ]; then
    python training_scripts/letters_task.py "$runs/task"
    port=$(python -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
    LAUNCHER="--num_accelerators 1 --master_port $port" bash training_scripts/quickstart.sh \
        --config training_scripts/letters.yaml --policy.model "$runs/task/model" \
        --data.path "$runs/task/train.jsonl" --data.eval_path "$runs/task/heldout.jsonl" --data.eval_limit 8 \
        --run.name letters --run.steps 1 --rollout.prompts_per_step 2 --log.wandb disabled
elif [ "$task" = letters ]; then
    bash training_scripts/quickstart.sh --toy --log.wandb disabled
else
    if [ -n "${WEIGHTS:-}" ] && [ ! -e "$WEIGHTS" ]; then cat "$WEIGHTS".?? >"$WEIGHTS"; fi
    bash training_scripts/quickstart.sh ${WEIGHTS:+--policy.model "$WEIGHTS"} --run.name real --log.wandb disabled
fi
python - "$run/metrics.jsonl" $((SECONDS - start)) >"$json" <<'END'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
accuracy = [row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row]
completions = max(row.get("progress/completions", 0) for row in rows)
speed = statistics.median(row.get("throughput/generated_tokens_per_s", 0) for row in rows if row["step"])
found = {"accuracy": [accuracy[0], accuracy[-1]], "completions": completions, "seconds": int(sys.argv[2])}
print(json.dumps(found | {"generated tokens/s": speed}))
END
[ -s "$json" ] || { rm -f "$json"; echo "the quickstart left no metrics" >&2; exit 1; }
