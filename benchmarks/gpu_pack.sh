#!/usr/bin/env bash
# Makes a folder with what a machine that has torch and triton, but no network, needs to run gpu.sh: the wheels of
# transformers and all other packages, and the sources of this commit. Run it in an environment made by
# training_scripts/setup.sh for "dev", with network:
#
#   bash benchmarks/gpu_pack.sh FOLDER         for a machine with this Python
#   bash benchmarks/gpu_pack.sh FOLDER 3.12    for a machine with Python 3.12, on x86-64
#
# It has pieces of at most 56 MiB, which may travel one by one: `base`; `pyarrow`, `pandas` and `bitsandbytes`, for a
# machine without them; and where quickstart.sh has fetched SmolLM2, `weights_1` and `weights_2`, halves of its file, for the part `real`.
# The versions are those of this environment. wandb, which no part uses, is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?gpu_pack.sh: name a new folder} most_kib=$((56 << 10))
python=${2:-$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
weights=${HYBRID_GRPO_CACHE:-$HOME/.cache/hybrid_grpo}/SmolLM2-135M-Instruct.Q4_1.gguf
if [ -e "$folder" ]; then
    echo "gpu_pack.sh: $folder is there already: name another folder" >&2
    exit 1
fi
mkdir -p "$folder"/{base,pyarrow,pandas,bitsandbytes}/wheels
folder=$(realpath "$folder") base=$(realpath "$folder/base")

# What the package and the parts require, and what that requires, without what comes with torch and triton.
PYTHONPATH=. python benchmarks/gpu_packages.py "$python" >"$folder/packages.txt"
package=$(grep '^deepspeed==' "$folder/packages.txt") # has no wheel on PyPI
echo "gpu_pack.sh: building $package"
DS_BUILD_OPS=0 DS_IGNORE_CUDA_DETECTION=1 python -m pip wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir "$base/wheels" "$package"
sed -i '/^deepspeed==/d' "$folder/packages.txt"
python -m pip download --quiet --no-deps --only-binary :all: --python-version "$python" \
    --platform={manylinux2014,manylinux_2_24,manylinux_2_28}_x86_64 --platform any \
    --dest "$base/wheels" --requirement "$folder/packages.txt"
rm "$folder/packages.txt"
for large in pyarrow pandas bitsandbytes; do mv "$base"/wheels/$large-* "$folder/$large/wheels"; done

mkdir "$base/hybrid_grpo"
git archive HEAD -- . ':!benchmarks/results' ':!docs' | tar -x -C "$base/hybrid_grpo"
git rev-parse --short=12 HEAD >"$base/hybrid_grpo/COMMIT"
if [ -e "$weights" ]; then
    sha256sum <"$weights" | cut -d' ' -f1 >"$base/weights.sha256"
    for half in 1 2; do
        mkdir "$folder/weights_$half"
        split -n $half/2 "$weights" >"$folder/weights_$half/half"
    done
    mkdir "$base/rows"
    PYTHONPATH=.:benchmarks python -c 'import pathlib, step_workloads as made, sys
made.real(pathlib.Path(sys.argv[1]))' "$base/rows"
fi
echo 'bash base/hybrid_grpo/benchmarks/gpu.sh lease_a' >"$folder/README"
echo "gpu_pack.sh: $folder for Python $python, in KiB; its README says what to type"
(cd "$folder" && du -sk -- */)
if [ "$(du -sk "$folder"/*/ | sort -rn | head -1 | cut -f1)" -gt $most_kib ]; then
    echo "gpu_pack.sh: a piece has more than $((most_kib >> 10)) MiB" >&2
    exit 1
fi
