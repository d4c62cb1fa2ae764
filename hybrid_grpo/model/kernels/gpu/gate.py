"""The gate of a Llama MLP on a GPU, and its gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

_BLOCK = 1024


@triton.jit
def _silu_times(out, gate, up, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gate + place, mask=inside, other=0.0)
    x = g.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(g.dtype).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (silu * u).to(g.dtype), mask=inside)


@triton.jit
def _silu_times_backward(dgate, dup, dout, gate, up, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    g = tl.load(gate + place, mask=inside, other=0.0)
    x = g.to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-x))
    d = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    silu = (x * sigmoid).to(g.dtype).to(tl.float32)
    tl.store(dup + place, (d * silu).to(g.dtype), mask=inside)
    tl.store(dgate + place, (d * u * sigmoid * (1.0 + x * (1.0 - sigmoid))).to(g.dtype), mask=inside)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU: Shazeer, arXiv:2002.05202), for contiguous tensors of one shape. Rounds after the silu,
    as a Llama layer does."""
    out = torch.empty_like(gate)
    launch(_silu_times, (triton.cdiv(gate.numel(), _BLOCK),), out, gate, up, gate.numel(), BLOCK=_BLOCK)
    return out


class SiluTimes(torch.autograd.Function):
    """`silu_times` with its gradient, for tensors of one shape."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return silu_times(gate, up)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        given = dgate, dup, dout.contiguous(), gate, up, gate.numel()
        launch(_silu_times_backward, (triton.cdiv(gate.numel(), _BLOCK),), *given, BLOCK=_BLOCK)
        return dgate, dup
