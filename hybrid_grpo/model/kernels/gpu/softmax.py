"""Log-softmax, entropy and their gradient over a tile of logits on a GPU; model/softmax.py has the formulas."""

import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

_BLOCK = 2048


@triton.jit
def _add(peaks, totals, belows, chosens, logits, stride, targets, first, columns, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    # A tile is added up in float32, and once to what is known of the row in float64, which many GPUs are slow at.
    peak, total, below = -1e30, 0.0, 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32) * inverse
        higher = tl.maximum(peak, tl.max(x, axis=0))
        gap = x - higher
        p = tl.exp(gap)
        shrink = tl.exp(peak - higher)
        below = (below + total * (higher - peak)) * shrink - tl.sum(tl.where(p > 0, gap * p, 0.0), axis=0)
        total = total * shrink + tl.sum(p, axis=0)
        peak = higher
    known, own = tl.load(peaks + row), tl.cast(peak, tl.float64)
    highest = tl.maximum(known, own)
    known_shrink, own_shrink = tl.exp(known - highest), tl.exp(own - highest)
    known_total, own_total = tl.load(totals + row), tl.cast(total, tl.float64)
    known_below = tl.load(belows + row) + known_total * (highest - known)
    own_below = tl.cast(below, tl.float64) + own_total * (highest - own)
    tl.store(peaks + row, highest)
    tl.store(totals + row, known_total * known_shrink + own_total * own_shrink)
    tl.store(belows + row, known_below * known_shrink + own_below * own_shrink)
    target = tl.load(targets + row) - first
    if (target >= 0) & (target < columns):
        tl.store(chosens + row, tl.load(logits + target).to(tl.float32) * inverse)


@triton.jit
def _gradient(
    out, out_stride, logits, stride, normalizers, targets, entropies, dlogps, dentropies, first, columns, inverse,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    logp = x * inverse - tl.load(normalizers + row)
    p = tl.exp(logp)
    dlogp = tl.load(dlogps + row)
    dx = -p * dlogp
    if ENTROPY:
        dx -= p * (logp + tl.load(entropies + row)) * tl.load(dentropies + row)
    dx += tl.where(column == tl.load(targets + row) - first, dlogp, 0.0)
    tl.store(out + row * out_stride + column, (dx * inverse).to(out.dtype.element_ty), mask=inside)


def add(
    sums: tuple[Tensor, Tensor, Tensor, Tensor], logits: Tensor, target_N: Tensor, temperature: float, first: int
) -> None:
    """Add a tile of logits to the running sums of `TiledSoftmax` (peak, total, below, chosen), reading it once."""
    rows, columns = logits.shape
    stride, inverse = logits.stride(0), 1 / temperature
    launch(_add, (rows,), *sums, logits, stride, target_N, first, columns, inverse, BLOCK=_BLOCK, num_warps=8)


def gradient(
    out: Tensor, logits: Tensor, normalizer_N: Tensor, target_N: Tensor, entropy_N: Tensor, dlogp_N: Tensor,
    dentropy_N: Tensor | None, temperature: float, first: int,
) -> None:  # fmt: skip
    """Compute `model.softmax.softmax_gradient` of a tile, and write it to `out`, which may be the tile itself."""
    rows, columns = logits.shape
    launch(
        _gradient, (rows, triton.cdiv(columns, _BLOCK)),
        out, out.stride(0), logits, logits.stride(0), normalizer_N, target_N, entropy_N, dlogp_N,
        dlogp_N if dentropy_N is None else dentropy_N, first, columns, 1 / temperature,
        ENTROPY=dentropy_N is not None, BLOCK=_BLOCK,
    )  # fmt: skip
