#!/usr/bin/env bash
# Create TRL's environment in a folder, once: bash benchmarks/trl_env.sh FOLDER
# Versions are those that this repository is measured with; DeepSpeed is built against the torch installed first.
set -euo pipefail
folder=$1
if [ -e "$folder/ready" ]; then exit; fi
echo "trl_env.sh: installing TRL in $folder (once)" >&2
"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
pip "torch==${TORCH_VERSION:-2.13.0}"
pip "setuptools>=69" wheel ninja py-cpuinfo psutil numpy
DS_BUILD_OPS=0 DS_IGNORE_CUDA_DETECTION=1 pip --no-build-isolation deepspeed==0.19.8
pip transformers==5.23.0 "trl==1.16.*" datasets
touch "$folder/ready"
