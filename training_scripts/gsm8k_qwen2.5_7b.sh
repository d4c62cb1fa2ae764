#!/usr/bin/env bash
# GSM8K with Qwen2.5-7B-Instruct on one node of 8 GPUs: ZeRO-3, optimizer and reference in host memory.
# Settings on the command line win: --run.steps 50 ...
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/launch.sh
setup
GPUS=${GPUS:-8} launch train --config training_scripts/gsm8k.yaml \
    --run.name gsm8k_qwen2.5_7b \
    --run.steps 200 \
    --policy.model Qwen/Qwen2.5-7B-Instruct \
    --policy.lr 1e-6 \
    --policy.warmup_steps 10 \
    --policy.gradient_checkpointing true \
    --policy.micro_batch_tokens 16384 \
    --engine.zero_stage 3 \
    --engine.offload_optimizer true \
    --grpo.beta 0.001 \
    --rollout.prompts_per_step 128 \
    --rollout.num_generations 8 \
    --rollout.max_slots 128 \
    "$@"
