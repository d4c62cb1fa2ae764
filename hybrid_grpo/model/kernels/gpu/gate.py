"""The gate of a Llama MLP on a GPU, and its gradient."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

_BLOCK = 1024


@triton.jit
def _silu_times(out, gate, up, gate_stride, up_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gate + row * gate_stride + place, mask=inside, other=0.0)
    x = g.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(g.dtype).to(tl.float32)
    u = tl.load(up + row * up_stride + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + place, (silu * u).to(g.dtype), mask=inside)


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


def silu_times(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up (SwiGLU: Shazeer, arXiv:2002.05202) to `out`, all [n, size]; the rows of gate and up may be
    parts of longer ones. Rounds after the silu, as a Llama layer does."""
    n, size = out.shape
    blocks = n, triton.cdiv(size, _BLOCK)
    launch(_silu_times, blocks, out, gate, up, gate.stride(0), up.stride(0), size, BLOCK=_BLOCK)


class SiluTimes(torch.autograd.Function):
    """`silu_times` with its gradient, for tensors of one shape."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        silu_times(*(x.view(-1, x.shape[-1]) for x in (gate, up, out)))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        dout, n = dout.contiguous(), gate.numel()
        launch(_silu_times_backward, (triton.cdiv(n, _BLOCK),), dgate, dup, dout, gate, up, n, BLOCK=_BLOCK)
        return dgate, dup
