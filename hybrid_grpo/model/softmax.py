"""A softmax over more columns than are ever in memory: they come a tile at a time, twice for a gradient.

The running sums are those of the online softmax (Milakov and Gimelshein, arXiv:1805.02867, algorithm 3), and one more
for the entropy. On a CPU in float32 a kernel (native/softmax.c) reads every row from memory once; elsewhere torch does
the same in a few passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_grpo.model.kernels.build import run, usable


class TiledSoftmax:
    """Log-probability of a target in every row (not a number where no tile has it), and the entropy of the row.

    Args:
        target_N: int64, the column of each row's target.
        temperature: the softmax is that of x = logits / temperature.
    """

    def __init__(self, target_N: Tensor, temperature: float) -> None:
        self._target_N = target_N
        self._temperature = temperature
        # float64: a row is the sum of many tiles. -1e30 is below any logit, and -inf - -inf would not be 0.
        self._peak_N = torch.full(target_N.shape, -1e30, dtype=torch.float64, device=target_N.device)
        self._total_N = torch.zeros_like(self._peak_N)
        """Sum of exp(x - peak)."""
        self._below_N = torch.zeros_like(self._peak_N)
        """Sum of exp(x - peak) (peak - x), whose terms are not negative: nothing cancels where the entropy is small."""
        self._chosen_N = torch.full_like(self._peak_N, torch.nan, dtype=torch.float32)
        """The target's x, when its tile has come."""

    def add(self, rows: slice, first: int, logits: Tensor) -> None:
        """Take the columns from `first` on of some rows; `logits`, float32 [rows, columns], are overwritten."""
        peak, total, below = self._peak_N[rows], self._total_N[rows], self._below_N[rows]
        chosen, target = self._chosen_N[rows], self._target_N[rows]
        if logits.is_contiguous() and usable(logits):
            sums = (peak, total, below, chosen)
            return run("softmax_add", *sums, logits, target, 1 / self._temperature, first, *logits.shape)
        x = logits.div_(self._temperature) if self._temperature != 1.0 else logits
        place, inside = _columns(target, first, x.shape[1])
        chosen.copy_(torch.where(inside, x.gather(1, place[:, None])[:, 0], chosen))
        higher = torch.maximum(peak, x.amax(1).double())
        shrink, rise = (peak - higher).exp(), higher - peak
        x.sub_(higher.float()[:, None])
        p = x.exp()
        below.add_(total * rise).mul_(shrink).sub_(x.mul_(p).sum(1))
        total.mul_(shrink).add_(p.sum(1))
        peak.copy_(higher)

    def logp_N(self) -> Tensor:
        """Log-probability of the targets, float32."""
        return (self._chosen_N - self._peak_N - self._total_N.log()).clamp(max=0.0).float()

    def entropy_N(self) -> Tensor:
        """Entropy of each row in nats, float32."""
        return (self._total_N.log() + self._below_N / self._total_N).clamp(min=0.0).float()

    def normalizer_N(self) -> Tensor:
        """What log p is x without, float32."""
        return (self._peak_N + self._total_N.log()).float()


def softmax_gradient(
    logits: Tensor,
    first: int,
    target_N: Tensor,
    normalizer_N: Tensor,
    entropy_N: Tensor,
    dlogp_N: Tensor,
    dentropy_N: Tensor | None,
    temperature: float,
    keep: bool,
) -> Tensor:
    """Gradient of sum(dlogp logp + dentropy entropy) with respect to a tile of logits.

    d logp / dx = [target] - p, d H / dx = -p (log p + H), x = logits / temperature.

    Args:
        logits: float32 [N, columns], from column `first` on; overwritten unless `keep`.
        target_N, normalizer_N, entropy_N: of all columns, see `TiledSoftmax`.
        dentropy_N: None for zeros.
    """
    if logits.is_contiguous() and usable(logits):
        out = torch.empty_like(logits) if keep else logits
        given = (logits, normalizer_N, target_N, entropy_N, dlogp_N.contiguous())
        dentropy_N = None if dentropy_N is None else dentropy_N.contiguous()
        run("softmax_gradient", out, *given, dentropy_N, 1 / temperature, first, *logits.shape)
        return out
    logp = logits / temperature if keep else logits.div_(temperature) if temperature != 1.0 else logits
    logp = logp.sub_(normalizer_N[:, None])
    p = logp.exp()
    if dentropy_N is None:
        dx = p.mul_(-dlogp_N[:, None])
    else:
        dx = logp.add_(entropy_N[:, None]).mul_(-dentropy_N[:, None]).sub_(dlogp_N[:, None]).mul_(p)
    place, inside = _columns(target_N, first, logits.shape[1])
    dx.scatter_add_(1, place[:, None], (dlogp_N * inside)[:, None])
    return dx.div_(temperature) if temperature != 1.0 else dx


def _columns(target_N: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Where the targets are among the columns, and whether they are."""
    place = target_N - first
    return place.clamp(0, width - 1), (place >= 0) & (place < width)
