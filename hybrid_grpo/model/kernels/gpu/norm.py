"""Residual and RMS norm on a GPU: one program adds a row to its residual and normalises the sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch


@triton.jit
def _add_norm(out, total, x, residual, weight, size, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row + column, mask=inside, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + row + column, mask=inside, other=0.0)).to(value.dtype)
        tl.store(total + row + column, value, mask=inside)
    value = value.to(tl.float32)
    variance = tl.sum(value * value, axis=0) / size
    scale = tl.load(weight + column, mask=inside, other=0.0)
    normed = (value * tl.rsqrt(variance + epsilon)).to(out.dtype.element_ty)
    tl.store(out + row + column, (normed.to(tl.float32) * scale).to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, to: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum x + residual (x itself if there is no residual), and weight * sum / rms(sum), both [n, size]; in
    `to`, if given, of which the first may be `x`.

    Root mean square layer normalisation: Zhang and Sennrich, arXiv:1910.07467. Rounds where a Llama layer rounds.
    """
    n, size = x.shape
    total, out = to or (x if residual is None else torch.empty_like(x), torch.empty_like(x))
    given = (out, total, x, x if residual is None else residual, weight, size, epsilon)
    launch(_add_norm, (n,), *given, ADD=residual is not None, BLOCK=triton.next_power_of_2(size), num_warps=8)
    return total, out
