"""Launches Triton kernels, and decides where they are used."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

try:
    import triton
except ImportError:
    triton = None


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def usable(*tensors: Tensor) -> bool:
    """Whether kernels can be compiled, and called on these tensors: on a GPU, with contiguous rows."""
    return triton is not None and all(on_gpu(t) and (not t.dim() or t.stride(-1) == 1) for t in tensors)


def tried(what: str, check: Callable[[], bool], kernel: str = "a Triton kernel") -> bool:
    """Return the result of `check`. If `check` fails or raises, warn that `what` runs more slowly, without `kernel`."""
    try:
        agrees, reason = check(), "its results differ from torch's"
    except Exception as error:  # a compiler that is missing or fails raises errors of many types
        agrees, reason = False, (str(error).strip() or type(error).__name__).splitlines()[0]
    if not agrees:
        warnings.warn(f"{what} is slower without {kernel}: {reason}", stacklevel=3)
    return agrees


@functools.cache
def proven(what: str, check: Callable[..., bool], *case: Any, kernel: str = "a Triton kernel") -> bool:
    """Whether a kernel agrees with torch for a `case` (a device, a dtype and so on); `check` runs once for each."""
    return tried(what, lambda: check(*case), kernel)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a kernel. Fake tensors (in a dry run) have no memory, so nothing is computed; nor without programs."""
    if all(grid) and not any(isinstance(argument, FakeTensor) for argument in arguments):
        kernel[grid](*arguments, **options)
