"""Credit: from what the reward functions say of completions to the advantage of every token."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from hybrid_grpo.config import TrainConfig, reward_name
from hybrid_grpo.config.errors import RunStopped
from hybrid_grpo.data.batch import Rollout, Scores
from hybrid_grpo.distributed import all_reduce
from hybrid_grpo.grpo.advantages import (
    group_advantages,
    normalized_rewards,
    reward_to_go_advantages,
    step_advantages,
)
from hybrid_grpo.grpo.length import overlong_penalty
from hybrid_grpo.run.metrics import Meter

_LENGTH = "length/penalty"
"""The punishment for length among the reward functions, none of which can have this name."""


def token_advantages(
    rollout: Rollout, scores: Scores, config: TrainConfig, kl_cost_B: Tensor | None, meter: Meter, device: torch.device
) -> Tensor:
    """Advantages of every token: those of its completion's reward, and of its steps where functions score steps.

    The reward is less what the completion's length costs, and its KL where that is part of the reward. Collective.

    Args:
        kl_cost_B: float64, beta times the KL of each completion; None where it is not part of the reward.
        meter: is given the mean punishment for length.
        device: where collectives take place.

    Returns:
        float32 [B, T] on the CPU, T the longest completion; beyond the end of a shorter one they mean nothing.

    Raises:
        RunStopped: functions score steps, and their rewards are to be normalized one by one.
    """
    grpo, group_size = config.grpo, rollout.num_generations
    # Of all ranks: one whose functions scored no step takes part in the deviation over all ranks, and in the refusal.
    scores_steps = bool(all_reduce(torch.tensor(int(scores.steps is not None), device=device), "max"))
    if scores_steps and grpo.combine_rewards == "normalize":
        raise RunStopped("grpo.combine_rewards normalize is not defined for rewards of steps: set it to sum")
    reward_B = _whole_rewards(rollout, scores, config, meter)
    if kl_cost_B is not None:
        reward_B = reward_B - kl_cost_B
    steps, lengths, scale = scores.steps or [[] for _ in rollout.completions], rollout.lengths, grpo.scale_rewards
    total = partial(_total, device=device)
    if scores_steps and grpo.step_credit == "reward_to_go":
        return reward_to_go_advantages(
            reward_B, steps, lengths, group_size, baseline=grpo.baseline, scale=scale, total=total
        )
    advantages_B = group_advantages(reward_B, group_size, baseline=grpo.baseline, scale=scale, total=total)
    advantages_BT = advantages_B[:, None].expand(-1, max(lengths))
    if scores_steps:
        advantages_BT = advantages_BT + step_advantages(steps, lengths, group_size, scale=scale, total=total)
    return advantages_BT


def _whole_rewards(rollout: Rollout, scores: Scores, config: TrainConfig, meter: Meter) -> Tensor:
    """float64 [B], what completions earn as wholes, less what their length costs."""
    grpo, group_size = config.grpo, rollout.num_generations
    limit = config.rollout.max_completion_tokens
    punishments = overlong_penalty(rollout.lengths, limit, grpo.overlong_buffer, grpo.overlong_penalty)
    punishment_B = torch.tensor(punishments, dtype=torch.float64)
    if grpo.overlong_buffer:
        meter.add("reward/overlong_penalty", punishment_B.mean(), len(punishment_B))
    if grpo.combine_rewards == "sum":
        return scores.outcome_B + punishment_B
    weights = {reward_name(reward): reward.weight for reward in config.rewards} | {_LENGTH: 1.0}
    missing_B = scores.reward_B.isnan()
    parts = {
        name: value_B.masked_fill(missing_B, math.nan)
        for name, value_B in (*scores.by_function.items(), (_LENGTH, punishment_B))
    }
    return normalized_rewards(parts, weights, group_size).masked_fill(missing_B, math.nan)


def mean_over_tokens(values_BT: Tensor, rollout: Rollout) -> Tensor:
    """float32 [B], on the CPU. In float64, where the mean of equal numbers is that number."""
    real_BT = rollout.mask_BT
    return (values_BT.cpu().double() * real_BT).sum(1).div(real_BT.sum(1)).float()


def _total(values: Tensor, device: torch.device) -> Tensor:
    return all_reduce(values.to(device)).cpu()
