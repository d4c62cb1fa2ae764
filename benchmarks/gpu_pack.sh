#!/usr/bin/env bash
# Makes a folder with what a machine that has torch and triton, but no network, needs to run gpu.sh: the wheels of
# transformers and all other packages, and the sources of this commit. Run it in an environment made by training_scripts/setup.sh
# for "dev", with network:
#
#   bash benchmarks/gpu_pack.sh FOLDER            for a machine with this Python
#   bash benchmarks/gpu_pack.sh FOLDER 3.12       for a machine with Python 3.12, on x86-64
#   bash benchmarks/gpu_pack.sh FOLDER 3.12 all   with pyarrow and what else reads data sets, which takes 65 MiB more:
#                                                 for the parts that train, which are step, plan and quickstart
#
# The versions are those of this environment. wandb, which no part uses, is left out.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:?gpu_pack.sh: name a new folder} most_mib=60
python=${2:-$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
if [ -e "$folder" ]; then
    echo "gpu_pack.sh: $folder is there already: name another folder" >&2
    exit 1
fi
mkdir -p "$folder/wheels"
folder=$(realpath "$folder")

# What the package and the tests require, and what that requires, without what comes with torch, triton and transformers.
mapfile -t packages < <(PYTHONPATH=. python benchmarks/gpu_packages.py "$python" ${3:+all})
for package in "${packages[@]}"; do
    case $package in
    deepspeed==*) # has no wheel on PyPI
        echo "gpu_pack.sh: building $package"
        DS_BUILD_OPS=0 DS_IGNORE_CUDA_DETECTION=1 python -m pip wheel --quiet --no-deps --no-build-isolation \
            --wheel-dir "$folder/wheels" "$package"
        ;;
    esac
done
printf '%s\n' "${packages[@]}" | grep -v '^deepspeed==' >"$folder/packages.txt"
python -m pip download --quiet --no-deps --only-binary :all: --python-version "$python" \
    --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform any \
    --dest "$folder/wheels" --requirement "$folder/packages.txt"
rm "$folder/packages.txt"

mkdir "$folder/hybrid_grpo"
git archive HEAD -- . ':!benchmarks/results' ':!docs' | tar -x -C "$folder/hybrid_grpo"
git rev-parse --short=12 HEAD >"$folder/hybrid_grpo/COMMIT"
cat >"$folder/README" <<'END'
python3 -m pip install --no-index --no-deps wheels/*
cd hybrid_grpo && SKIP_SETUP=1 bash benchmarks/gpu.sh profile
END
mib=$(du -sm "$folder" | cut -f1)
echo "gpu_pack.sh: $folder has $mib MiB for Python $python; its README says what to type"
if [ "$mib" -gt $most_mib ]; then
    echo "gpu_pack.sh: more than $most_mib MiB; the largest files are" >&2
    (cd "$folder" && du -sm -- wheels/* hybrid_grpo | sort -rn | head -5) >&2
fi
