"""Compiles the C kernels with the machine's C compiler, once, and loads them.

Without a compiler everything works, but slower. The library is cached in `HYBRID_GRPO_CACHE` (default:
~/.cache/hybrid_grpo), under a hash of the sources, compiler, flags and processor.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hybrid_grpo.model.doing import Doing

_SOURCES = [Path(__file__).with_name(name) for name in ("attention.c", "decoding.c", "softmax.c", "states.c")]
_HEADERS = [Path(__file__).with_name(name) for name in ("vectors.h", "states.h", "half.h")]
# -ffast-math reorders sums, which is fine for logits, and assumes no infinities, which the kernels do not use.
_FLAGS = ["-O3", "-march=native", "-ffast-math", "-fPIC", "-fopenmp"]
_POINTER: Any = ctypes.c_void_p
_INTEGER: Any = ctypes.c_int64
_REAL: Any = ctypes.c_float
_STRIDED = [_POINTER, _INTEGER, _INTEGER]
_ROWS = [_POINTER, _INTEGER]
_ARGUMENTS = {
    "segment_attention": [_POINTER] * 7 + [_INTEGER] * 6 + [_REAL] * 2,
    "segment_attention_gradient": [_POINTER] * 11 + [_INTEGER] * 6 + [_REAL] * 2,
    "linear": [_POINTER] * 4 + [_INTEGER] * 3,
    "rms_norm": [_POINTER] * 3 + [_REAL] * 2 + [_INTEGER] * 2,
    "decode_attention": [_POINTER, *_STRIDED * 3, *[_POINTER] * 4, *[_INTEGER] * 7, _REAL, _REAL, _POINTER, _INTEGER],
    "decode": [_POINTER] * 7 + [_INTEGER] * 2 + [_POINTER] * 2,
    "sample": [_POINTER] * 7 + [_REAL] + [_INTEGER] * 2,
    "conv_step": [_POINTER, *_ROWS, *[_POINTER] * 3, *[_INTEGER] * 4],
    "delta_step": [_POINTER] * 2 + _ROWS * 3 + [_POINTER] * 2 + [_INTEGER] * 7,
    "mamba_step": [_POINTER] * 3 + [_INTEGER] + [_POINTER] * 2 + _ROWS * 2 + [_POINTER, *[_INTEGER] * 6],
    "gated_norm": [_POINTER] * 4 + [_REAL] + [_INTEGER] * 2,
    "softmax_add": [_POINTER] * 6 + [_REAL] + [_INTEGER] * 3,
    "softmax_gradient": [_POINTER] * 7 + [_REAL] + [_INTEGER] * 3,
}
"""Argument types of each C function."""


@functools.cache
def load() -> Any | None:
    """Return the compiled kernels; if they cannot be compiled, warn once and return None."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        warnings.warn("no C compiler (cc, gcc, clang) found: computing on the CPU is slower", stacklevel=2)
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        warnings.warn(
            f"the C kernels do not compile, so computing on the CPU is slower: {reason.strip()}", stacklevel=2
        )
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def cache() -> Path:
    """Return the folder of what is made once on a machine."""
    return Path(os.environ.get("HYBRID_GRPO_CACHE") or Path.home() / ".cache" / "hybrid_grpo")


def _compiled(compiler: str) -> Path:
    """Return the path of the shared library, which is compiled first if it is not cached."""
    folder = cache()
    # Link the OpenMP library that torch has loaded: two of them would keep two pools of threads spinning.
    openmp = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))) or ["-fopenmp"]
    identity = [*(source.read_text() for source in [*_HEADERS, *_SOURCES]), compiler, *_FLAGS, *openmp, _processor()]
    target = folder / f"native_{hashlib.sha256('|'.join(identity).encode()).hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with Doing("compiling the C kernels, once"), tempfile.TemporaryDirectory(dir=folder) as scratch:
            run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
            objects = []
            for source in _SOURCES:
                objects.append(f"{scratch}/{source.stem}.o")
                run([compiler, *_FLAGS, "-c", str(source), "-o", objects[-1]])
            # Linked without -ffast-math, which would make the whole process flush denormal numbers to zero.
            run([compiler, "-shared", *objects, *openmp, "-lm", "-o", f"{scratch}/native.so"])
            os.replace(f"{scratch}/native.so", target)
    return target


def _processor() -> str:
    """Return the processor's features, which -march=native depends on, since machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def usable(*tensors: Tensor | None, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels can be called on these tensors: of `dtype`, in host memory, with contiguous rows, or None.
    Fake tensors in half precision stand for those of a GPU, unless their mode is told otherwise."""
    fitting = (
        t.dtype == dtype and t.device.type == "cpu" and (not t.dim() or t.stride(-1) == 1)
        for t in tensors
        if t is not None
    )
    fake = isinstance(tensors[0], FakeTensor) and getattr(tensors[0].fake_mode, "stands_for_gpu", True)
    stands_in = dtype.itemsize == 2 and fake
    return not stands_in and all(fitting) and load() is not None


def run(name: str, *arguments: Tensor | float | None) -> None:
    """Call a kernel with the addresses of tensors. Fake tensors (in a dry run) have none, so nothing is computed."""
    if not any(isinstance(argument, FakeTensor) for argument in arguments):
        pointed = (a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        getattr(load(), name)(*pointed)
