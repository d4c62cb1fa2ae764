"""The mathematics of the policy loss: tensors in, tensors out. No ranks, no configuration, no devices.

Notation of the papers: GRPO is DeepSeekMath (arXiv:2402.03300), DAPO is arXiv:2503.14476, Dr. GRPO is
arXiv:2503.20783, PPO is arXiv:1707.06347. Shapes are explained in data/batch.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios beyond this would overflow exp in float32; the ratio is far outside any clip range by then."""


@dataclass(frozen=True)
class LossStats:
    """Sums over real tokens, to be divided by the token count after reduction over micro-batches and ranks."""

    tokens: Tensor
    kl: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    ratio_max: Tensor
    """A maximum, not a sum."""


def token_weights(
    mask_bT: Tensor,
    loss_type: Literal["dapo", "grpo", "dr_grpo"],
    *,
    total_tokens: int,
    total_rows: int,
    max_completion_tokens: int,
) -> Tensor:
    """Weight of every token's loss, so that the sum over a minibatch of all ranks is its average.

    `dapo`: 1 / all tokens (DAPO eq. 8). `grpo`: 1 / (rows * tokens of the row) (DeepSeekMath eq. 3).
    `dr_grpo`: 1 / (rows * max_completion_tokens), which removes the length bias (Dr. GRPO section 3.2).

    Args:
        mask_bT: bool, True on real tokens.
        total_tokens, total_rows: counts over the whole minibatch and all ranks, not of this micro-batch.
        max_completion_tokens: the constant of dr_grpo.

    Returns:
        float32 [b, T], 0 on padding.
    """
    mask = mask_bT.float()
    if loss_type == "dapo":
        return mask / total_tokens
    if loss_type == "grpo":
        # A completion always has a token; the clamp keeps an all-padding row (weight 0 anyway) from 0 / 0.
        return mask / (total_rows * mask.sum(1, keepdim=True).clamp(min=1))
    return mask / (total_rows * max_completion_tokens)


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The estimator exp(d) - d - 1 of KL(policy || reference), d = ref_logp - logp; never negative.

    DeepSeekMath eq. 4 (Schulman's k3). The clamp keeps exp finite when the two have drifted far apart.
    """
    d = (ref_logp - logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return d.exp() - d - 1


def policy_loss(
    logp_bT: Tensor,
    old_logp_bT: Tensor,
    advantages_b: Tensor,
    weight_bT: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    beta: float = 0.0,
    ref_logp_bT: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """The clipped surrogate plus beta times the KL to the reference, weighted and summed.

    Per token, with ratio r = exp(logp - old_logp) and the completion's advantage A (DeepSeekMath eq. 3, with
    DAPO's separate bounds, eq. 8):  -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) + beta k3.

    Args:
        logp_bT: float32, of the policy now; carries the gradient.
        old_logp_bT: float32, of the policy that sampled.
        advantages_b: float32.
        weight_bT: float32, 0 on padding; see `token_weights`. The caller chose the denominator.
        ref_logp_bT: float32, of the reference; needed when beta is not 0.

    Returns:
        The loss, a scalar, and statistics of the real tokens (those of weight above 0).
    """
    log_ratio = (logp_bT - old_logp_bT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    advantages = advantages_b[:, None]
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    token_loss = -torch.minimum(ratio * advantages, clipped * advantages)
    kl = torch.zeros_like(token_loss)
    if beta != 0:
        assert ref_logp_bT is not None, "a KL term needs ref_logp"
        kl = k3(logp_bT, ref_logp_bT)
        token_loss = token_loss + beta * kl
    loss = (token_loss * weight_bT).sum()

    with torch.no_grad():
        real = weight_bT > 0
        low = (ratio < 1 - epsilon_low) & (advantages < 0) & real
        high = (ratio > 1 + epsilon_high) & (advantages > 0) & real
        stats = LossStats(
            tokens=real.sum(),
            kl=(kl * real).sum(),
            clipped_low=low.sum(),
            clipped_high=high.sum(),
            ratio_max=torch.where(real, ratio, 0.0).max(),
        )
    return loss, stats
