"""The gate of a Llama MLP on a GPU."""

import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

_BLOCK = 1024


@triton.jit
def _silu_times(out, gate_up, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gate_up + 2 * row * size + place, mask=inside, other=0.0)
    x = g.to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(g.dtype).to(tl.float32)
    u = tl.load(gate_up + (2 * row + 1) * size + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + place, (silu * u).to(g.dtype), mask=inside)


def silu_times(gate_up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up (SwiGLU: Shazeer, arXiv:2002.05202) to `out` [n, size], for gate and up beside each other,
    [n, 2 * size]. Rounds after the silu, as a Llama layer does."""
    n, size = out.shape
    launch(_silu_times, (n, triton.cdiv(size, _BLOCK)), out, gate_up, size, BLOCK=_BLOCK)
