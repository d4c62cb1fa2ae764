#!/usr/bin/env bash
# A reward model from Qwen2.5-0.5B-Instruct and UltraFeedback's pairs, on one GPU of 40 GB or more; with
# --policy.gradient_checkpointing true, of 24 GB. Settings on the command line win: --run.steps 50 ...
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/launch.sh
setup
GPUS=${GPUS:-1} launch reward \
    --run.name reward_model_qwen2.5_0.5b \
    --run.steps 970 \
    --policy.model Qwen/Qwen2.5-0.5B-Instruct \
    --policy.lr 1e-5 \
    --policy.lr_schedule linear \
    --policy.warmup_steps 50 \
    --policy.micro_batch_tokens 16384 \
    --data.path trl-lib/ultrafeedback_binarized \
    --data.eval_split test \
    --reward.batch_size 64 \
    --reward.max_tokens 2048 \
    --reward.center_coefficient 0.01 \
    --eval.every 100 \
    "$@"
