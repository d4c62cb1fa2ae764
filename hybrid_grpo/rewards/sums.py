"""Adds up the rewards that functions returned for the completions of a rollout."""

import math
from collections.abc import Sequence

import torch

from hybrid_grpo.data.batch import RewardStatus, Scores
from hybrid_grpo.distributed.workers.calls import Failure, Reply
from hybrid_grpo.rewards.functions import RewardValue
from hybrid_grpo.rewards.loader import Reward


def combined(rewards: Sequence[Reward], replies: dict[str, Reply], lengths: list[int], num_generations: int) -> Scores:
    """Combine the rewards that functions returned into weighted sums.

    A function that does not apply to a row adds nothing to the row's reward, which is 0.0 if no function applies, as in
    TRL. A row on which a function failed has no reward. If a function scores steps anywhere in a group, then a number
    that it returns for another row of that group is the reward of a single step, the whole completion. In `replies`, by
    function name, steps are given by their ends in tokens, of which each completion has one of the `lengths`.
    """
    failed_B = torch.tensor(
        [any(reply.failures[row] for reply in replies.values()) for row in range(len(lengths))], dtype=torch.bool
    )
    by_function: dict[str, torch.Tensor] = {}
    status: dict[str, torch.Tensor] = {}
    weighted, whole = [], []
    steps: list[dict[int, float]] = [{} for _ in lengths]  # by their ends, weighted
    scores_steps = False
    for reward in rewards:
        reply = replies[reward.name]
        value_B = torch.tensor(list(map(_sum, reply.values)), dtype=torch.float64)
        in_steps_B = torch.tensor([isinstance(value, list) for value in reply.values], dtype=torch.bool)
        # All rows of a group in which the function scored the steps of at least one row.
        by_steps_B = in_steps_B.view(-1, num_generations).any(1).repeat_interleave(num_generations)
        by_function[reward.name] = value_B
        status[reward.name] = torch.tensor(list(map(_status, reply.values, reply.failures)), dtype=torch.int8)
        weighted.append(reward.weight * value_B)
        whole.append(reward.weight * value_B.masked_fill(by_steps_B, 0.0))
        scores_steps |= bool(by_steps_B.any())
        for row, value in enumerate(reply.values):
            if by_steps_B[row] and value is not None and not failed_B[row]:
                for end, step in value if isinstance(value, list) else [(lengths[row], value)]:
                    steps[row][end] = steps[row].get(end, 0.0) + reward.weight * step

    def total(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts).nansum(dim=0).masked_fill(failed_B, math.nan)

    failed = {name: reply.failures for name, reply in replies.items() if any(reply.failures)}
    return Scores(
        reward_B=total(weighted), by_function=by_function, status=status,
        steps=[sorted(row.items()) for row in steps] if scores_steps else None,
        whole_B=total(whole) if scores_steps else None,
        extra={f"{name}/{column}": stored for name, reply in replies.items() for column, stored in reply.extra.items()},
        failures={name: [each.message if each else None for each in rows] for name, rows in failed.items()},
    )  # fmt: skip


def _sum(value: RewardValue) -> float:
    if value is None:
        return math.nan
    return sum(reward for _, reward in value) if isinstance(value, list) else value


def _status(value: RewardValue, failure: Failure | None) -> int:
    if failure is None:
        return RewardStatus.SCORED if value is not None else RewardStatus.NOT_APPLICABLE
    return RewardStatus.TIMED_OUT if failure.kind == "timeout" else RewardStatus.FAILED
