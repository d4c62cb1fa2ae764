"""The reward of a completion: what the functions said of it, added up with their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch

from hybrid_grpo.data.batch import RewardStatus, Scores, Step
from hybrid_grpo.rewards.functions import Failure, Reply, Value
from hybrid_grpo.rewards.loading import Reward


def combined(rewards: Sequence[Reward], replies: dict[str, Reply], lengths: list[int], num_generations: int) -> Scores:
    """The weighted sum of what functions said.

    A function that does not apply to a row adds nothing to its reward; where none applies the reward is 0.0, as in TRL.
    A row that a function failed on has no reward. In a group in which a function scores steps, a number of it is the
    reward of one step that is the whole completion.

    Args:
        replies: by name; steps by their ends in tokens.
        lengths: [B], tokens of the completions.
        num_generations: G
    """
    values = {name: torch.tensor(list(map(_sum, reply.values)), dtype=torch.float64) for name, reply in replies.items()}
    status = {
        name: torch.tensor([_status(v, f) for v, f in zip(reply.values, reply.failures, strict=True)], dtype=torch.int8)
        for name, reply in replies.items()
    }
    failed_B = torch.stack([status_B >= RewardStatus.FAILED for status_B in status.values()]).any(0)
    weighted = torch.stack([reward.weight * values[reward.name] for reward in rewards])
    reward_B = weighted.nansum(dim=0).masked_fill(failed_B, math.nan)
    extra = {f"{name}/{column}": stored for name, reply in replies.items() for column, stored in reply.extra.items()}
    failures = {
        name: [failure.message if failure else None for failure in reply.failures]
        for name, reply in replies.items()
        if any(reply.failures)
    }
    steps = {reward.name: _steps(replies[reward.name].values, lengths, num_generations) for reward in rewards}
    if all(row is None for rows in steps.values() for row in rows):
        return Scores(reward_B, values, status, extra=extra, failures=failures)
    whole = [
        reward.weight * values[reward.name].masked_fill(torch.tensor([r is not None for r in steps[reward.name]]), 0.0)
        for reward in rewards
    ]
    weighted_steps = [
        [
            (end, reward.weight * v)
            for reward in rewards
            for end, v in steps[reward.name][row] or ()
            if not failed_B[row]
        ]
        for row in range(len(reward_B))
    ]
    whole_B = torch.stack(whole).nansum(dim=0).masked_fill(failed_B, math.nan)
    return Scores(reward_B, values, status, list(map(_merged, weighted_steps)), whole_B, extra, failures)


def _sum(value: Value) -> float:
    if value is None:
        return math.nan
    return sum(reward for _, reward in value) if isinstance(value, list) else value


def _status(value: Value, failure: Failure | None) -> int:
    if failure is None:
        return RewardStatus.SCORED if value is not None else RewardStatus.NOT_APPLICABLE
    return RewardStatus.TIMED_OUT if failure.kind == "timeout" else RewardStatus.FAILED


def _steps(values: list[Value], lengths: list[int], num_generations: int) -> list[list[Step] | None]:
    """What one function says of the steps of each row; None in groups that it scores as wholes."""
    rows: list[list[Step] | None] = []
    for first in range(0, len(values), num_generations):
        group = range(first, first + num_generations)
        if any(isinstance(values[row], list) for row in group):
            rows += [_as_steps(values[row], lengths[row]) for row in group]
        else:
            rows += [None] * num_generations
    return rows


def _as_steps(value: Value, length: int) -> list[Step]:
    if isinstance(value, list):
        return cast(list[Step], value)
    return [] if value is None else [(length, value)]


def _merged(steps: list[Step]) -> list[Step]:
    """The steps of several functions as those of one: rewards with the same end are added up."""
    merged: dict[int, float] = {}
    for end, reward in steps:
        merged[end] = merged.get(end, 0.0) + reward
    return sorted(merged.items())
