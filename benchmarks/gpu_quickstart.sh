#!/usr/bin/env bash
# The quickstart as a part of gpu.sh: bash benchmarks/gpu_quickstart.sh RUNS TOY JSON
# If TOY is not empty: two steps of its GRPO run on one rank, from the model before the supervised warm-up.
set -euo pipefail
cd "$(dirname "$0")/.."
runs=$1 toy=$2 json=$3 start=$SECONDS
export RUNS=$runs
if [ -n "$toy" ]; then
    python training_scripts/quickstart_task.py "$runs/task"
    port=$(python -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
    LAUNCHER="--num_accelerators 1 --master_port $port" bash training_scripts/quickstart.sh \
        --config training_scripts/quickstart.yaml --policy.model "$runs/task/model" \
        --data.path "$runs/task/train.jsonl" --data.eval_path "$runs/task/heldout.jsonl" --data.eval_limit 8 \
        --run.steps 1 --rollout.prompts_per_step 2 --log.wandb disabled
else
    bash training_scripts/quickstart.sh --log.wandb disabled
fi
python - "$runs/quickstart/metrics.jsonl" $((SECONDS - start)) >"$json" <<'END'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
accuracy = [row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row]
completions = max(row.get("progress/completions", 0) for row in rows)
print(json.dumps({"accuracy": [accuracy[0], accuracy[-1]], "completions": completions, "seconds": int(sys.argv[2])}))
END
[ -s "$json" ] || { rm -f "$json"; echo "the quickstart left no metrics" >&2; exit 1; }
