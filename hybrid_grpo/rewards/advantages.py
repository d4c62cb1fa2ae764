"""From the rewards of a group to its advantages, and what the groups of a step look like.

Tensors in, tensors out: no ranks. A group never spans ranks, so no communication is needed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_STD_EPSILON = 1e-4  # a group of nearly equal rewards must not blow its last digits up to advantages of size 1


@dataclass(frozen=True)
class GroupStats:
    """Counts of the groups on this rank; sums over ranks are the counts of the step."""

    groups: int
    """All groups."""
    zero_std: int
    """Groups whose rewards are all equal: they teach nothing."""
    all_right: int
    """Groups in which every completion reaches the threshold."""
    all_wrong: int
    """Groups in which none does."""


def group_advantages(reward_B: Tensor, num_generations: int, scale: Literal["group", "none"]) -> Tensor:
    """Rewards relative to their group: DeepSeekMath, arXiv:2402.03300, section 4.1.2.

    `group` gives A = (r - mean) / (std + 1e-4) with the unbiased std; `none` leaves out the division
    (Dr. GRPO, arXiv:2503.20783). A group whose rewards are all equal has advantages of exactly 0: this is
    tested by equality, because the mean of equal numbers can differ from them in the last digit.

    Args:
        reward_B: finite, group after group.
        num_generations: G, completions per group, 2 or more.
        scale: whether to divide by the group's standard deviation.

    Returns:
        float32 [B], computed in float64.
    """
    assert num_generations >= 2 and reward_B.numel() % num_generations == 0
    reward_PG = reward_B.to(torch.float64).view(-1, num_generations)
    advantage_PG = reward_PG - reward_PG.mean(dim=1, keepdim=True)
    if scale == "group":
        advantage_PG = advantage_PG / (reward_PG.std(dim=1, keepdim=True) + _STD_EPSILON)
    return advantage_PG.masked_fill(_all_equal(reward_PG)[:, None], 0.0).flatten().to(torch.float32)


def group_stats(reward_B: Tensor, outcome_B: Tensor, num_generations: int, threshold: float) -> GroupStats:
    """Count the groups that teach nothing, and the groups that are too easy or too hard.

    Args:
        reward_B: finite, group after group: what advantages are made of.
        outcome_B: the reward that tells right from wrong; NaN (does not apply) is wrong.
        num_generations: G, completions per group.
        threshold: smallest outcome of a right completion.
    """
    right_PG = (outcome_B >= threshold).view(-1, num_generations)
    return GroupStats(
        groups=right_PG.shape[0],
        zero_std=int(_all_equal(reward_B.view(-1, num_generations)).sum()),
        all_right=int(right_PG.all(dim=1).sum()),
        all_wrong=int((~right_PG).all(dim=1).sum()),
    )


def _all_equal(reward_PG: Tensor) -> Tensor:
    return reward_PG.amax(dim=1) == reward_PG.amin(dim=1)
