"""Corrects the loss for a sampler whose probabilities differ from those of the training forward: CORRECTIONS."""

from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Numbers
from hybrid_grpo.grpo.surrogates import exp, masked, mean_over_tokens

Correction = tuple[Tensor, Tensor, Tensor]
"""The ratio, the loss's factor, and where (bool) it was cut, each [b, T]."""


def _truncated(ratio_bT: Tensor, grpo: GrpoConfig) -> Correction:
    low, high = grpo.sampler_ratio_min, grpo.sampler_ratio_max
    return ratio_bT, ratio_bT.clamp(low, high), (ratio_bT > high) | (ratio_bT < (low or 0.0))


def _outside(ratio_bT: Tensor, grpo: GrpoConfig) -> Tensor:
    high = grpo.sampler_ratio_max
    low = 1 / high if grpo.sampler_ratio_min is None else grpo.sampler_ratio_min
    return (ratio_bT < low) | (ratio_bT > high)


def _mask(log_ratio_bT: Tensor, real_bT: Tensor, grpo: GrpoConfig) -> Correction:
    ratio_bT = exp(mean_over_tokens(log_ratio_bT, real_bT)).expand_as(log_ratio_bT)
    dropped_bT = _outside(ratio_bT, grpo)
    return ratio_bT, (~dropped_bT).to(ratio_bT), dropped_bT


def _band(log_ratio_bT: Tensor, real_bT: Tensor, grpo: GrpoConfig) -> Correction:
    ratio_bT = exp(log_ratio_bT)
    dropped_bT = _outside(ratio_bT, grpo)
    return ratio_bT, torch.where(dropped_bT, 0.0, ratio_bT), dropped_bT


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, GrpoConfig], Correction]] = {
    "none": lambda log_bT, real_bT, _: (exp(log_bT), torch.ones_like(log_bT), torch.zeros_like(real_bT)),
    "truncate": lambda log_bT, real_bT, grpo: _truncated(exp(log_bT), grpo),
    "sequence": lambda log_bT, _, grpo: _truncated(exp(log_bT.sum(1, keepdim=True)).expand_as(log_bT), grpo),
    "mask": _mask,
    "band": _band,
}
"""Functions of the tokens' log(old / sampler), 0 outside the mask. With r = old / sampler of a token, and the bounds
low = sampler_ratio_min and high = sampler_ratio_max:

`truncate`: clip(r, low, high), low being 0 if it is not set (truncated importance sampling, Yao et al. 2025, "Your
efficient RL framework secretly brings you off-policy RL training"). `sequence`: the same with the product of the
completion's r. `mask`: 0 for completions whose geometric mean of r is outside [low, high], else 1. `band`: r where it
is within [low, high], else 0 (IcePop; Ring-1T, arXiv:2510.18855). `mask` and `band` take 1 / high for a low not set.
"""


def sampler_correction(
    old_logp_bT: Tensor, sampler_logp_bT: Tensor, mask_bT: Tensor, grpo: GrpoConfig
) -> tuple[Tensor, Numbers]:
    """Return factors for the policy loss that correct for the difference between the sampler and the training forward.

    `old_logp_bT` comes from the training forward with the weights that sampled. The factors are [b, T], without
    gradient, and 0 on padding. Metrics over real tokens are returned too: the mean and the maximum of the ratio before
    truncation, which is that of a whole completion for `mask` and `sequence`, and the share of tokens whose weight was
    cut, or whose completion was dropped.
    """
    log_ratio_bT = (masked(old_logp_bT, mask_bT) - masked(sampler_logp_bT, mask_bT)).detach()
    ratio_bT, factor_bT, cut_bT = CORRECTIONS[grpo.sampler_correction](log_ratio_bT, mask_bT, grpo)
    tokens = mask_bT.sum()
    ratio_bT = masked(ratio_bT, mask_bT)
    return masked(factor_bT, mask_bT), {
        "parity/ratio_mean": (ratio_bT.sum() / tokens.clamp(min=1), tokens),
        "parity/ratio_max": (ratio_bT.max(), tokens.clamp(max=1)),
        "parity/corrected_frac": ((cut_bT & mask_bT).sum() / tokens.clamp(min=1), tokens),
    }
