#!/usr/bin/env bash
# GSM8K with Qwen2.5-0.5B-Instruct on one GPU of 40 GB or more; with --policy.gradient_checkpointing true, of 24 GB.
# Settings on the command line win: --run.steps 50 ...
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/launch.sh
setup
GPUS=${GPUS:-1} launch train --config training_scripts/gsm8k.yaml \
    --run.name gsm8k_qwen2.5_0.5b \
    --run.steps 200 \
    --policy.model Qwen/Qwen2.5-0.5B-Instruct \
    --policy.lr 1e-6 \
    --policy.warmup_steps 10 \
    --policy.micro_batch_tokens 16384 \
    --rollout.prompts_per_step 32 \
    --rollout.num_generations 8 \
    --rollout.max_slots 256 \
    "$@"
