"""Log-softmax, entropy and their gradient, over logits that are computed tile by tile rather than all at once.

The running sums are those of the online softmax (Milakov and Gimelshein, arXiv:1805.02867, algorithm 3), plus one for
the entropy. kernels/softmax.c (float32 on a CPU) and kernels/gpu/softmax.py read each tile once, torch a few times.
"""

import torch
from torch import Tensor

from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.kernels.build import run, usable


def on_gpu_kernel(logits: Tensor) -> bool:
    """Whether the GPU kernel, which reads a tile once and in its own dtype, can be used for tiles like `logits`."""
    return gpu.usable(logits) and gpu.proven("the log-probability head", _kernel_agrees, logits.device, logits.dtype)


class TiledSoftmax:
    """Running sums for the log-probability of each row's target and the entropy of each row, for x = logits /
    temperature. `target_N` holds the targets' columns."""

    def __init__(self, target_N: Tensor, temperature: float) -> None:
        self._target_N = target_N
        self._temperature = temperature
        # float64, since a row sums many tiles. The peak starts at -1e30 rather than -inf: -inf - -inf is NaN.
        self._peak_N = torch.full(target_N.shape, -1e30, dtype=torch.float64, device=target_N.device)
        self._total_N = torch.zeros_like(self._peak_N)
        """Sum of exp(x - peak)."""
        self._below_N = torch.zeros_like(self._peak_N)
        """Sum of exp(x - peak) (peak - x). No term is negative, so nothing cancels if the entropy is small."""
        self._chosen_N = torch.full_like(self._peak_N, torch.nan, dtype=torch.float32)
        """The target's x; NaN until its tile is added."""

    def sums(self, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of the running sums of some rows: peak, total, below and chosen."""
        return self._peak_N[rows], self._total_N[rows], self._below_N[rows], self._chosen_N[rows]

    def add(self, rows: slice, first: int, logits: Tensor) -> None:
        """Add a tile, whose first column is `first`; `logits` [rows, columns] may be overwritten."""
        sums, target = self.sums(rows), self._target_N[rows]
        if on_gpu_kernel(logits):
            return gpu.softmax.add(sums, logits, target, self._temperature, first)
        x = logits.float()
        if x.is_contiguous() and usable(x):
            return run("softmax_add", *sums, x, target, 1 / self._temperature, first, *x.shape)
        x = x.div_(self._temperature) if self._temperature != 1.0 else x
        peak, total, below, chosen = sums
        column, inside = _columns(target, first, x.shape[1])
        chosen.copy_(torch.where(inside, x.gather(1, column[:, None])[:, 0], chosen))
        higher = torch.maximum(peak, x.amax(1).double())
        shrink, rise = (peak - higher).exp(), higher - peak
        x.sub_(higher.float()[:, None])
        p = x.exp()
        below.add_(total * rise).mul_(shrink).sub_(x.mul_(p).sum(1))
        total.mul_(shrink).add_(p.sum(1))
        peak.copy_(higher)

    def logp_N(self) -> Tensor:
        return (self._chosen_N - self._peak_N - self._total_N.log()).clamp(max=0.0).float()

    def entropy_N(self) -> Tensor:
        return (self._total_N.log() + self._below_N / self._total_N).clamp(min=0.0).float()

    def normalizer_N(self) -> Tensor:
        """Log-sum-exp of each row: log p = x - normalizer."""
        return (self._peak_N + self._total_N.log()).float()


def softmax_gradient(
    logits: Tensor, first: int, target_N: Tensor, normalizer_N: Tensor, entropy_N: Tensor, dlogp_N: Tensor,
    dentropy_N: Tensor | None, temperature: float, keep: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of sum(dlogp logp + dentropy entropy) with respect to a tile of logits.

    d logp / dx = [target] - p, d H / dx = -p (log p + H), x = logits / temperature.

    Args:
        logits: [N, columns], of any float type, starting at column `first`; may be overwritten unless `keep`.
        target_N, normalizer_N, entropy_N: computed over all columns; see `TiledSoftmax`.
        dentropy_N: None means zeros.
    """
    dlogp_N, dentropy_N = dlogp_N.contiguous(), None if dentropy_N is None else dentropy_N.contiguous()
    if on_gpu_kernel(logits):
        # Round to the dtype of the matrix products that follow; not yet if a soft cap multiplies the gradient first.
        out = torch.empty_like(logits, dtype=torch.float32) if keep else logits
        gpu.softmax.gradient(out, logits, normalizer_N, target_N, entropy_N, dlogp_N, dentropy_N, temperature, first)
        return out
    logits = logits.float()
    if logits.is_contiguous() and usable(logits):
        out = torch.empty_like(logits) if keep else logits
        run("softmax_gradient", out, logits, normalizer_N, target_N, entropy_N, dlogp_N, dentropy_N,
            1 / temperature, first, *logits.shape)  # fmt: skip
        return out
    logp = logits / temperature if keep else logits.div_(temperature) if temperature != 1.0 else logits
    logp = logp.sub_(normalizer_N[:, None])
    p = logp.exp()
    if dentropy_N is None:
        dx = p.mul_(-dlogp_N[:, None])
    else:
        dx = logp.add_(entropy_N[:, None]).mul_(-dentropy_N[:, None]).sub_(dlogp_N[:, None]).mul_(p)
    column, inside = _columns(target_N, first, logits.shape[1])
    dx.scatter_add_(1, column[:, None], (dlogp_N * inside)[:, None])
    return dx.div_(temperature) if temperature != 1.0 else dx


def _columns(target_N: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Return each target's column within the tile (clamped to it), and whether the tile contains the target."""
    column = target_N - first
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def _kernel_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the GPU kernel's sums and gradient of a tile agree with torch's, up to the rounding of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(8, 4096, generator=generator)).to(device, dtype)
    target_N = torch.arange(8, device=device) * 300 + 1000
    dlogp_N, dentropy_N = torch.randn(2, 8, generator=generator).to(device)
    softmax = TiledSoftmax(target_N, 0.8)
    gpu.softmax.add(softmax.sums(slice(None)), logits, target_N, 0.8, 1000)
    out = torch.empty_like(logits)
    normalizer_N, entropy_N = softmax.normalizer_N(), softmax.entropy_N()
    gpu.softmax.gradient(out, logits, normalizer_N, target_N, entropy_N, dlogp_N, dentropy_N, 0.8, 1000)
    logp = (logits.double() / 0.8).log_softmax(-1)
    is_target = torch.arange(1000, 5096, device=device) == target_N[:, None]
    entropy_N1 = -(logp.exp() * logp).sum(-1, keepdim=True)
    dx = dlogp_N[:, None] * (is_target.double() - logp.exp()) - dentropy_N[:, None] * logp.exp() * (logp + entropy_N1)
    return (
        torch.allclose(softmax.logp_N().double(), logp[is_target], atol=1e-4)
        and torch.allclose(entropy_N.double(), entropy_N1[:, 0], atol=1e-4)
        and torch.allclose(out.double() * 0.8, dx, rtol=1e-2, atol=1e-5)
    )
