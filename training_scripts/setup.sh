# Sourced by the other scripts and by tests/run.sh: installs hybrid_grpo, with the extras in $1, into an environment.
#
# SKIP_SETUP=1 uses the environment as it is. Otherwise it uses the active virtual environment, or creates and activates
# .venv. torch is installed first, unless a suitable version is there already. TORCH_VERSION chooses another version (on
# machines without a GPU, 2.13.0 is a CPU build). TORCH_INDEX names an index of torch's own wheels: for a driver that
# supports CUDA 12 only, https://download.pytorch.org/whl/cu126, since PyPI has builds for CUDA 13 only. DeepSpeed is
# installed without prebuilt kernels: those that a run needs are compiled when it first starts.

setup() {
    if [ -n "${SKIP_SETUP:-}" ]; then return; fi
    local extras=${1:-} python=${PYTHON:-python3} start=$SECONDS
    if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
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
    local stamp
    stamp="$(python -c 'import sys; print(sys.prefix)')/hybrid_grpo-$({ cat setup.py && echo "$PWD ${TORCH_VERSION:-} ${TORCH_INDEX:-}"; } | cksum | cut -d' ' -f1)"
    if [ -e "$stamp-$extras" ] || { [ -z "$extras" ] && compgen -G "$stamp-*" >/dev/null; }; then return; fi
    echo "setup: installing, once: minutes, of which most are for torch's packages"
    if [ -n "${TORCH_VERSION:-}${TORCH_INDEX:-}" ] || ! python -c '
import sys
try:
    import torch
except ImportError:
    sys.exit(1)
sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))'; then
        echo "setup: torch ${TORCH_VERSION:-2.13.0}"
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
