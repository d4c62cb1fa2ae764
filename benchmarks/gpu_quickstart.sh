#!/usr/bin/env bash
# Quickstarts as parts of gpu.sh: bash benchmarks/gpu_quickstart.sh letters|real RUNS TOY JSON
# `real` reads the problems of the folder ROWS_OF_REAL, for a machine without the package that makes them. If TOY is not
# empty: a step of the letters on one rank, from the model before the supervised warm-up.
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
    given=()
    if [ -d "${ROWS_OF_REAL:-}" ]; then
        given=(--config training_scripts/quickstart.yaml --data.task null --data.path "$ROWS_OF_REAL/train.jsonl"
            --data.eval_path "$ROWS_OF_REAL/heldout.jsonl" --rewards '[{function: numeric_answer, kwargs: {last_number: true}}]'
            --policy.model "${HYBRID_GRPO_CACHE:-$HOME/.cache/hybrid_grpo}/SmolLM2-135M-Instruct.Q4_1.gguf")
    fi
    bash training_scripts/quickstart.sh "${given[@]}" --run.name real --log.wandb disabled
fi
python - "$run/metrics.jsonl" $((SECONDS - start)) >"$json.part" <<'END'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
accuracy = [row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row]
completions = max(row.get("progress/completions", 0) for row in rows)
speed = statistics.median(row.get("throughput/generated_tokens_per_s", 0) for row in rows if row["step"])
found = {"accuracy": [accuracy[0], accuracy[-1]], "completions": completions, "seconds": int(sys.argv[2])}
print(json.dumps(found | {"generated tokens/s": speed}))
END
if [ -s "$json.part" ]; then mv "$json.part" "$json"; else echo "the quickstart left no metrics" >&2 && exit 1; fi
