#!/usr/bin/env bash
# GSM8K on one or two GPUs of 24 to 48 GB:
#
#   GPUS=2 bash training_scripts/small_gpus.sh MODEL [lora] [4bit] [unmerged] [offload] [settings]
#
# docs/memory.md says which words suit which model on which GPU. Settings on the command line win: --run.steps 50 ...
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/launch.sh
model=${1:?a model, as in: small_gpus.sh Qwen/Qwen2.5-1.5B-Instruct offload}
shift
name=gsm8k_$(basename "$model" | tr '[:upper:]' '[:lower:]')
recipes=(--config training_scripts/gsm8k.yaml --config training_scripts/small_gpus/full.yaml)
while [[ "${1:-}" =~ ^(lora|4bit|unmerged|offload)$ ]]; do
    recipes+=(--config "training_scripts/small_gpus/$1.yaml")
    name+=_$1
    shift
done
setup qlora
GPUS=${GPUS:-1} launch train "${recipes[@]}" --run.name "$name" --policy.model "$model" "$@"
