# Sourced by launch.sh and by tests/run.sh: installs hybrid_grpo, with the extras in $1, into an environment.
#
# The environment is .venv, which is made if need be. SETUP_INTO_ACTIVE=1 takes the active one, of venv or conda;
# SKIP_SETUP=1 runs what is on the path, and installs nothing. torch is installed first, unless a suitable version is
# there already: where no GPU is seen and pip would bring a build for CUDA, the CPU build from torch's own index, if that
# can be reached. TORCH_VERSION chooses another version, and TORCH_INDEX another index: for a driver that supports CUDA
# 12 only, https://download.pytorch.org/whl/cu126, since PyPI has builds for CUDA 13 only. DeepSpeed is installed without
# its kernels, which no run needs.

setup() {
    if [ -n "${SKIP_SETUP:-}" ]; then return; fi
    if [ "$(uname -s)" != Linux ]; then
        echo "setup: this is $(uname -s), and hybrid_grpo needs Linux: a container, or WSL 2 on Windows" >&2
        return 1
    fi
    local extras=${1:-} python=${PYTHON:-python3} start=$SECONDS TORCH_INDEX=${TORCH_INDEX:-}
    local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} prefix stamp offer cpu
    if [ -z "$active" ] || [ -z "${SETUP_INTO_ACTIVE:-}" ]; then
        if [ ! -x .venv/bin/python ]; then
            "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
                echo "setup: $python is not Python 3.11 to 3.13; name one with PYTHON=python3.11" >&2
                return 1
            }
            echo "setup: making the environment .venv"
            "$python" -m venv .venv
        fi
        # shellcheck disable=SC1091
        . .venv/bin/activate
    fi
    prefix=$(python -c 'import sys; print(sys.prefix)')
    if [ -n "$active" ] && [ "$active" != "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]; then
        echo "setup: using $prefix, not the active environment $active (SETUP_INTO_ACTIVE=1 would)"
    else
        echo "setup: using $prefix"
    fi
    stamp="$prefix/hybrid_grpo-$({ cat setup.py && echo "$PWD ${TORCH_VERSION:-} $TORCH_INDEX"; } | cksum | cut -d' ' -f1)"
    if [ -e "$stamp-$extras" ] || { [ -z "$extras" ] && compgen -G "$stamp-*" >/dev/null; }; then return; fi
    echo "setup: installing, once: minutes, of which most are for torch's packages"
    if [ -n "${TORCH_VERSION:-}$TORCH_INDEX" ] || ! python -c '
import sys
try:
    import torch
except ImportError:
    sys.exit(1)
sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))'; then
        offer=$(torch_offer)
        if [[ $offer == *CUDA* && -z $TORCH_INDEX ]] && ! gpu_devices; then
            TORCH_INDEX=https://download.pytorch.org/whl/cpu
            cpu=$(torch_offer)
            if [[ $cpu == *CPU* ]]; then offer=$cpu; else TORCH_INDEX=; fi
        fi
        echo "setup: ${offer:-torch ${TORCH_VERSION:-2.13.0}}"
        python -m pip install --quiet ${TORCH_INDEX:+--upgrade --extra-index-url "$TORCH_INDEX"} "torch==${TORCH_VERSION:-2.13.0}" || return
    fi
    echo "setup: what builds DeepSpeed"
    # What DeepSpeed's build imports, since it is built against the torch above, without isolation.
    python -m pip install --quiet "setuptools>=69" wheel ninja py-cpuinfo numpy psutil || return
    echo "setup: DeepSpeed"
    # DeepSpeed's installation looks for nvcc and fails without it, although it is not needed when no kernels are built.
    DS_BUILD_OPS=0 DS_IGNORE_CUDA_DETECTION=1 python -m pip install --quiet --no-build-isolation "deepspeed>=0.19.8" || return
    echo "setup: hybrid_grpo and its packages"
    python -m pip install --quiet --no-build-isolation --editable ".${extras:+[$extras]}" || return
    touch "$stamp-$extras"
    echo "setup: installed in $((SECONDS - start)) s"
}

torch_offer() { # what pip would install as torch, in words; nothing if pip cannot say
    {
        python -m pip install --dry-run --quiet --report - --retries 1 --timeout 15 \
            ${TORCH_INDEX:+--upgrade --extra-index-url "$TORCH_INDEX"} "torch==${TORCH_VERSION:-2.13.0}" 2>/dev/null || true
    } | python training_scripts/downloads.py || true
}

gpu_devices() { # whether this machine may have a GPU
    compgen -G "/dev/nvidia*" >/dev/null || [ -e /dev/nvmap ] || [ -e /dev/kfd ] || [ -e /dev/dxg ]
}
