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


fallbacks: dict[str, str] = {}
"""What this process computes without a kernel, and why."""


def fall_back(what: str, kernel: str, reason: str) -> None:
    """Warn that `what` runs more slowly, without `kernel`, and note it in `fallbacks`."""
    fallbacks[f"{what} without {kernel}"] = reason
    warnings.warn(f"{what} is slower without {kernel}: {reason}", stacklevel=4)


def slow_ranks(fallbacks_R: list[dict[str, str]]) -> str:
    """Return which ranks compute what without a kernel, and why, given the `fallbacks` of each; "" if none does."""
    ranks: dict[str, list[str]] = {}
    for number, found in enumerate(fallbacks_R):
        for what, reason in found.items():
            ranks.setdefault(f"{what}: {reason}", []).append(str(number))
    return "; ".join(f"ranks {' '.join(those)}: {what}" for what, those in ranks.items())


def tried(what: str, check: Callable[[], bool], kernel: str = "a Triton kernel") -> bool:
    """Return the result of `check`. If `check` fails or raises, warn that `what` runs more slowly, without `kernel`."""
    try:
        agrees, reason = check(), "its results differ from torch's"
    except Exception as error:  # a compiler that is missing or fails raises errors of many types
        agrees, reason = False, (str(error).strip() or type(error).__name__).splitlines()[0]
    if not agrees:
        fall_back(what, kernel, reason)
    return agrees


@functools.cache
def proven(what: str, check: Callable[..., bool], *case: Any, kernel: str = "a Triton kernel") -> bool:
    """Whether a kernel agrees with torch for a `case` (a device, a dtype and so on); `check` runs once for each."""
    return tried(what, lambda: check(*case), kernel)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a kernel. Fake tensors (in a dry run) have no memory, so nothing is computed; nor without programs."""
    if all(grid) and not any(isinstance(argument, FakeTensor) for argument in arguments):
        kernel[grid](*arguments, **options)
