"""What rewards of a group are compared with, and what the difference is divided by: BASELINES, SCALES.

In all functions, `value_PN` holds the numbers of each group in float64, and `applies_PN` (bool) where there is one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_STD_EPSILON = 1e-4  # keeps rounding noise in nearly equal rewards from becoming advantages of size 1

Total = Callable[[Tensor], Tensor]
"""Sums a tensor over ranks; the sum is on the CPU."""


def on_one_rank(values: Tensor) -> Tensor:
    """The sum over ranks if there is one."""
    return values


def centered(value_PN: Tensor, applies_PN: Tensor, weight_PN: Tensor | None = None) -> Tensor:
    """Return each number that applies minus their (weighted) mean in its group, 0 for others; exactly 0 if all are
    equal, or if nothing in the group has a weight."""
    value_PN = torch.where(applies_PN, value_PN, 0.0)
    weight_PN = applies_PN if weight_PN is None else torch.where(applies_PN, weight_PN, 0.0)
    sum_P1 = weight_PN.sum(1, keepdim=True)
    mean_P1 = (weight_PN * value_PN).sum(1, keepdim=True) / torch.where(sum_P1 == 0, 1, sum_P1)
    teaches_PN = applies_PN & differ(value_PN, applies_PN)[:, None] & (sum_P1 != 0)
    return torch.where(teaches_PN, value_PN - mean_P1, 0.0)


def differ(value_PN: Tensor, applies_PN: Tensor) -> Tensor:
    """Return whether the numbers of each group that apply differ, bool [P]; False if fewer than two apply."""
    highest_P = torch.where(applies_PN, value_PN, -torch.inf).amax(1)
    return highest_P > torch.where(applies_PN, value_PN, torch.inf).amin(1)


def group_scale(value_PN: Tensor, advantage_PN: Tensor, applies_PN: Tensor, sum_over_ranks: Total) -> Tensor:
    """The unbiased standard deviation + 1e-4 of each group's rewards, [P, 1]; see SCALES."""
    # A group of one number has no deviation; its centered number is 0.
    count_P1 = applies_PN.sum(1, keepdim=True)
    squares_PN = centered(value_PN, applies_PN).square()
    return (squares_PN.sum(1, keepdim=True) / (count_P1 - 1).clamp(min=1)).sqrt() + _STD_EPSILON


def _batch_scale(value_PN: Tensor, advantage_PN: Tensor, applies_PN: Tensor, sum_over_ranks: Total) -> Tensor:
    squares, count = sum_over_ranks(torch.stack([advantage_PN.square().sum(), applies_PN.sum().to(torch.float64)]))
    return (squares / (count - 1).clamp(min=1)).sqrt() + _STD_EPSILON


def _mean_scale(value_PN: Tensor, advantage_PN: Tensor, applies_PN: Tensor, sum_over_ranks: Total) -> Tensor:
    sums_P1 = torch.where(applies_PN, value_PN, 0.0).abs().sum(1, keepdim=True)
    return torch.where(sums_P1 == 0, 1.0, sums_P1 / applies_PN.sum(1, keepdim=True).clamp(min=1))


SCALES: dict[str, Callable[[Tensor, Tensor, Tensor, Total], Tensor]] = {
    "group": group_scale,
    "batch": _batch_scale,
    "mean": _mean_scale,
    "none": lambda value_PN, advantage_PN, applies_PN, _: torch.ones_like(advantage_PN[:, :1]),
}
"""Functions of rewards, their distances to the baseline (0 where none applies) and where there is a reward, that return
the divisor of these distances: the unbiased standard deviation + 1e-4 of the group's rewards, or of the distances on
all ranks (TRL's `batch` takes that of rewards); the mean of the group's rewards (MaxRL, arXiv:2602.02710), without
their signs, so that none turns around; or 1 (Dr. GRPO, arXiv:2503.20783)."""


def _leave_one_out(value_PN: Tensor, applies_PN: Tensor, weight_PN: Tensor | None) -> Tensor:
    # A reward is part of the group's mean, so it is g / (g - 1) times as far from the mean of the others.
    count_P1 = applies_PN.sum(1, keepdim=True)
    return centered(value_PN, applies_PN) * (count_P1 / (count_P1 - 1).clamp(min=1))


def _best_other(value_PN: Tensor, applies_PN: Tensor, weight_PN: Tensor | None) -> Tensor:
    best_P2 = torch.where(applies_PN, value_PN, -torch.inf).topk(2, dim=1).values
    is_best_PN = applies_PN & (value_PN == best_P2[:, :1]) & (applies_PN.sum(1, keepdim=True) > 1)
    return torch.where(is_best_PN, best_P2[:, :1] - best_P2[:, 1:], 0.0)


BASELINES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "mean": lambda value_PN, applies_PN, weight_PN: centered(value_PN, applies_PN),
    "leave_one_out": _leave_one_out,
    "length": centered,
    "optimal": centered,
    "best_other": _best_other,
}
"""Functions of rewards, where there is one, and weights that return the distance of rewards to the baseline, which is
the mean of the group (DeepSeekMath, arXiv:2402.03300, section 4.1.2), or of its other rewards (RLOO, arXiv:2402.14740);
the mean weighted by length (OPO, arXiv:2505.23585), or by `path_variances`; or, for the best reward alone, the best of
the others: the gradient of the group's best reward (arXiv:2503.19595). There, the others have advantage 0."""


def path_variances(logp_BT: Tensor, squares_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return, for each token, how much the tokens up to it add to the variance of the gradient: the sum of
    1 - 2 p + q, float64 [B, T] on the CPU, 0 outside the mask (arXiv:2602.07078). p is the sampled token's probability
    and q the sum of the squares of all probabilities there; 1 - 2 p + q is the squared norm of the gradient of log p
    with respect to the logits.

    Baseline `optimal` weighs rewards by these numbers: of all baselines that depend on the position alone, it is that
    of the smallest variance, as far as this norm stands for that of the whole gradient.
    """
    norm_BT = (1 - 2 * logp_BT.double().exp() + squares_BT.double()).cpu().clamp(min=0)
    return torch.where(mask_BT, torch.where(mask_BT, norm_BT, 0.0).cumsum(1), 0.0)
