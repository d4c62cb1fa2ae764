"""The kernels of native.c for decoding on a CPU in float32: compiled once with the machine's C compiler, then loaded.

Where there is no compiler everything works without them, slower. The compiled file is kept in the user's cache
folder (`HYBRID_GRPO_CACHE`, else ~/.cache/hybrid_grpo) under a name made of its source, flags and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_SOURCE = Path(__file__).with_name("native.c")
# Contracting and reordering sums is fine for logits; that infinities exist is not relied on.
_FLAGS = ["-O3", "-march=native", "-ffast-math", "-fPIC", "-fopenmp"]
FEW_ROWS = 512
"""Up to so many rows the kernel is at least as fast as torch's matrix product; beyond, rows outgrow the cache."""
_POINTER: Any = ctypes.c_void_p
_INTEGER: Any = ctypes.c_int64
_REAL: Any = ctypes.c_float


@functools.cache
def library() -> Any | None:
    """The compiled kernels; None where they cannot be compiled, which is said once."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        warnings.warn("no C compiler (cc, gcc, clang) found: decoding on the CPU is slower", stacklevel=2)
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        warnings.warn(f"native.c does not compile, decoding on the CPU is slower: {reason.strip()}", stacklevel=2)
        return None
    loaded.linear.argtypes = [_POINTER] * 4 + [_INTEGER] * 3
    loaded.rms_norm.argtypes = [_POINTER] * 3 + [_REAL] * 2 + [_INTEGER] * 2
    strided = [_POINTER, _INTEGER, _INTEGER]
    loaded.decode_attention.argtypes = [_POINTER, *strided * 3, *[_POINTER] * 4, *[_INTEGER] * 7, _REAL, _REAL]
    loaded.decode.argtypes = [_POINTER] * 7 + [_INTEGER] * 2
    loaded.sample.argtypes = [_POINTER] * 5 + [_REAL] + [_INTEGER] * 2
    for function in (loaded.linear, loaded.rms_norm, loaded.decode_attention, loaded.decode, loaded.sample):
        function.restype = None
    return loaded


def _compiled(compiler: str) -> Path:
    """The shared library, compiled unless it is there."""
    folder = Path(os.environ.get("HYBRID_GRPO_CACHE") or Path.home() / ".cache" / "hybrid_grpo")
    # With the OpenMP that torch has loaded: two of them would keep two pools of threads spinning.
    openmp = sorted(map(str, (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))) or ["-fopenmp"]
    identity = [_SOURCE.read_text(), compiler, *_FLAGS, *openmp, _processor()]
    target = folder / f"native_{hashlib.sha256('|'.join(identity).encode()).hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
            run([compiler, *_FLAGS, "-c", str(_SOURCE), "-o", f"{scratch}/native.o"])
            # Linked without -ffast-math, which would make the whole process flush denormal numbers to zero.
            run([compiler, "-shared", f"{scratch}/native.o", *openmp, "-lm", "-o", f"{scratch}/native.so"])
            os.replace(f"{scratch}/native.so", target)
    return target


def _processor() -> str:
    """What -march=native depends on: home folders are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: float32, in host memory, rows of numbers that follow each other."""
    return all(
        t.dtype == torch.float32 and t.device.type == "cpu" and (t.dim() == 0 or t.stride(-1) == 1) for t in tensors
    )


def adopt(model: Any) -> None:
    """Let the linear and RMS-norm modules of a model whose weights are there run on the kernels.

    A norm is taken over only if one of the two known formulas gives what its own forward gives.
    """
    if not usable(*model.parameters()) or library() is None:
        return
    for module in model.modules():
        kind = type(module)
        if kind is nn.Linear and usable(module.weight):
            module.forward = MethodType(_linear, module)
        elif kind.__name__.endswith("RMSNorm") and (norm := _norm_of(module)) is not None:
            module.forward = MethodType(norm, module)


def _linear(module: Any, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    k = x.shape[-1]
    rows = x.numel() // k
    if rows > FEW_ROWS or not (x.is_contiguous() and weight.is_contiguous()):
        return nn.functional.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    pointer = None if bias is None else bias.data_ptr()
    library().linear(out.data_ptr(), x.data_ptr(), weight.data_ptr(), pointer, rows, weight.shape[0], k)  # type: ignore[union-attr]
    return out


def _norm_of(module: Any) -> Any | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(epsilon, float) or weight is None or weight.dim() != 1 or not usable(weight):
        return None
    x = torch.linspace(-2, 3, 2 * len(weight)).view(2, -1)
    for offset in (0.0, 1.0):

        def norm(module: Any, x: Tensor, offset: float = offset) -> Tensor:
            x = x.contiguous()
            out = torch.empty_like(x)
            weight = module.weight
            rows = x.numel() // len(weight)
            library().rms_norm(  # type: ignore[union-attr]
                out.data_ptr(), x.data_ptr(), weight.data_ptr(), offset, epsilon, rows, len(weight)
            )
            return out

        if torch.allclose(norm(module, x), module(x), rtol=1e-5, atol=1e-6):
            return norm
    return None


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    position: Tensor,
    window: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """Store the new keys and values and attend; see native.c.

    Args:
        query: [n, heads, 1, d]; key, value: [n, kv, 1, d], of the new tokens.
        keys, values: the layer's pools, [pages, page, kv, d].
        table: int32 [n, width], pages of each sequence.
        position: int64 [n], of the new tokens.
        window: positions seen, the own one included; 0 for all.
        softcap: 0 for none.

    Returns:
        [n, 1, heads, d].
    """
    n, heads, _, d = query.shape
    out = query.new_empty(n, 1, heads, d)
    library().decode_attention(  # type: ignore[union-attr]
        out.data_ptr(),
        *(query.data_ptr(), query.stride(0), query.stride(1)),
        *(key.data_ptr(), key.stride(0), key.stride(1)),
        *(value.data_ptr(), value.stride(0), value.stride(1)),
        *(keys.data_ptr(), values.data_ptr(), table.data_ptr(), position.data_ptr()),
        *(n, heads, key.shape[1], d, keys.shape[1], table.stride(0), window, scale, softcap),
    )
    return out


def can_attend(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `decode_attention` takes these shapes and types."""
    return (
        usable(query, keys, values)
        and keys.shape == values.shape
        and fits(query.shape[1] // keys.shape[2], keys.shape[1], query.shape[3])
        and library() is not None
    )


def fits(group: int, page: int, d: int) -> bool:
    """Whether a page's scores and the sums of a key's query heads have room on the kernel's stack."""
    return group <= 64 and group * page <= 2048 and group * d <= 8192


def sample(logits_nV: Tensor, key_n: Tensor, counter_n: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens (int64 [n]) and log-probabilities (float32 [n]) without filters or penalties; see `Sampler`."""
    n, vocabulary = logits_nV.shape
    token_n, logp_n = key_n.new_empty(n), logits_nV.new_empty(n)
    library().sample(  # type: ignore[union-attr]
        *(t.data_ptr() for t in (token_n, logp_n, logits_nV, key_n, counter_n)), temperature, n, vocabulary
    )
    return token_n, logp_n
