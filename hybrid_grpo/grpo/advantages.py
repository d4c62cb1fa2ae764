"""Turns the rewards of a group into the advantages of its tokens.

`token_advantages` does the whole computation; the functions after it are its parts. A group never spans ranks; for
statistics over all ranks, the caller passes `sum_over_ranks`. Arithmetic is float64. To find out whether all rewards of
a group are equal, they are compared: in floating point their mean can differ from them in the last digit, and that
difference, divided by a standard deviation that is also rounding noise, would become a gradient.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from hybrid_grpo.config.errors import RunStopped
from hybrid_grpo.config.grpo import Baseline, GrpoConfig, Scale
from hybrid_grpo.data.batch import Numbers, Rollout, Scores
from hybrid_grpo.data.episodes import Part
from hybrid_grpo.grpo.baselines import BASELINES, SCALES, Total, centered, differ, group_scale, on_one_rank

_LENGTH = "length/penalty"
"""Name of the length penalty among the reward functions; no function can have it, since names contain no slash."""

Steps = list[list[tuple[int, float]]]
"""For each of B completions, the (end, reward) of its steps; `end` is the number of tokens up to the step's end."""


def token_advantages(
    rollout: Rollout, scores: Scores, grpo: GrpoConfig, max_completion_tokens: int, weights: Mapping[str, float],
    kl_BT: Tensor | None, beta: float, sum_over_ranks: Total, variance_BT: Tensor | None = None,
) -> tuple[Tensor, Numbers]:  # fmt: skip
    """Compute the advantage of every token, from its completion's reward and, where there are any, of steps or parts.

    The reward is reduced by the length penalty, and by the KL if the KL is part of the reward.

    Args:
        max_completion_tokens, weights: see `penalized_rewards`.
        kl_BT: float32, the KL of each token in nats; None if the KL is not part of the reward.
        beta: coefficient of this KL in the reward.
        sum_over_ranks: every rank calls it the same number of times.
        variance_BT: for baseline `optimal`, see `path_variances`; None otherwise.

    Returns:
        The advantages, float32 [B, T] on the CPU, undefined after the end of a completion, and 0 in groups of one; and
        the mean length penalty. Raises RunStopped where settings are not defined for rewards of steps or parts.
    """
    group_size = rollout.num_generations
    if group_size == 1:
        return torch.zeros(len(rollout.completions), max(rollout.lengths)), {}
    parts = [of.episode.parts if of.episode else () for of in rollout.completions]
    has_more = any(len(of) > len(its) > 0 for of, its in zip(scores.steps or (), parts, strict=False))
    # On any rank: a rank whose functions scored no step still takes part in the deviation over all ranks.
    found = torch.tensor([int(scores.steps is not None), int(any(parts)), int(has_more)])
    scores_steps, has_parts, has_more = map(bool, sum_over_ranks(found).tolist())
    _refuse_undefined(grpo, scores_steps, has_parts, has_more)
    reward_B, numbers = penalized_rewards(rollout, scores, grpo, max_completion_tokens, weights)
    if kl_BT is not None:
        reward_B = reward_B - beta * kl_BT.sum(1).double().cpu()
    steps, lengths, scale = scores.steps or [[] for _ in rollout.completions], rollout.lengths, grpo.scale_rewards
    weight_B = torch.tensor(lengths, dtype=torch.float64)
    if variance_BT is not None or (scores_steps and not has_parts and grpo.step_credit == "reward_to_go"):
        to_go = partial(reward_to_go_advantages, baseline=grpo.baseline, scale=scale, sum_over_ranks=sum_over_ranks)
        weight_BT = weight_B[:, None] if variance_BT is None else variance_BT
        return to_go(reward_B, steps, lengths, group_size, discount=grpo.step_discount, weight_BT=weight_BT), numbers
    advantages_B = group_advantages(
        reward_B, group_size, baseline=grpo.baseline, scale=scale, sum_over_ranks=sum_over_ranks, weight_B=weight_B
    )
    advantages_BT = advantages_B[:, None].expand(-1, max(lengths))
    if has_parts:
        rewarded = [[] if missing else of for of, missing in zip(parts, reward_B.isnan().tolist(), strict=True)]
        return advantages_BT + part_advantages(rewarded, lengths, group_size, scale, sum_over_ranks), numbers
    if scores_steps:
        advantages_BT = advantages_BT + step_advantages(
            steps, lengths, group_size, scale=scale, sum_over_ranks=sum_over_ranks, discount=grpo.step_discount
        )
    return advantages_BT, numbers


def _refuse_undefined(grpo: GrpoConfig, scores_steps: bool, has_parts: bool, has_more: bool) -> None:
    """Raise RunStopped for settings that are not defined for rewards of steps or parts, or if a function scores steps
    of completions that have parts (`has_more`)."""
    if (scores_steps or has_parts) and grpo.combine_rewards == "normalize":
        raise RunStopped("grpo.combine_rewards normalize is not defined for rewards of steps: set it to sum")
    if scores_steps and grpo.baseline == "best_other":
        raise RunStopped("grpo.baseline best_other is not defined for rewards of steps: set it to mean")
    if has_parts and grpo.baseline == "optimal":
        raise RunStopped("grpo.baseline optimal is not defined for several rewards of an episode: set it to mean")
    if has_more:
        raise RunStopped("rewards: a function scores steps of episodes with several rewards: let it return numbers")


def penalized_rewards(
    rollout: Rollout, scores: Scores, grpo: GrpoConfig, max_completion_tokens: int, weights: Mapping[str, float]
) -> tuple[Tensor, Numbers]:
    """Return the rewards of whole completions including the length penalty, float64 [B], and the mean penalty as a
    metric. `weights` are the weights of the reward functions, by name."""
    buffer = grpo.overlong_tokens(max_completion_tokens) if grpo.overlong_buffer else 0
    penalties = overlong_penalty(rollout.lengths, max_completion_tokens, buffer, grpo.overlong_penalty)
    penalty_B = torch.tensor(penalties, dtype=torch.float64)
    own_B = penalty_B[[row for row, completion in enumerate(rollout.completions) if not completion.writer]]
    numbers: Numbers = {"reward/overlong_penalty": (own_B.mean(), len(own_B))} if grpo.overlong_buffer else {}
    if grpo.combine_rewards == "sum":
        return scores.outcome_B + penalty_B, numbers
    missing_B = scores.reward_B.isnan()
    parts = {
        name: value_B.masked_fill(missing_B, math.nan)
        for name, value_B in (*scores.by_function.items(), (_LENGTH, penalty_B))
    }
    weights = {**weights, _LENGTH: 1.0}
    return normalized_rewards(parts, weights, rollout.num_generations).masked_fill(missing_B, math.nan), numbers


def mean_over_tokens(values_BT: Tensor, rollout: Rollout) -> Tensor:
    """Return the mean of each row, float32 [B] on the CPU, computed in float64: the mean of equal numbers is exact."""
    real_BT = rollout.mask_BT
    return (values_BT.cpu().double() * real_BT).sum(1).div(real_BT.sum(1)).float()


def group_advantages(
    reward_B: Tensor, num_generations: int, *, baseline: Baseline, scale: Scale, sum_over_ranks: Total = on_one_rank,
    weight_B: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return rewards relative to their group, (r - baseline) / scale (BASELINES, SCALES). Exactly 0 if all are equal.

    With baseline `mean`, scale `batch` is REINFORCE++ with baseline (arXiv:2501.03262), whose second centring, over the
    batch, changes nothing, since all groups are of one size. Of `normalized_rewards` it gives the advantages of GDPO.

    Args:
        reward_B: group after group; NaN for a completion without a reward, which counts neither in the mean nor in the
            deviation and has advantage 0.
        num_generations: completions per group, 2 or more.
        sum_over_ranks: called once, for scale `batch` only.
        weight_B: positive; needed for baseline `length`.

    Returns:
        float32 [B].
    """
    reward_PG = _groups(reward_B, num_generations)
    applies_PG = ~reward_PG.isnan()
    weight_PG = None if weight_B is None else _groups(weight_B, num_generations)
    advantage_PG = BASELINES[baseline](reward_PG, applies_PG, weight_PG)
    advantage_PG = advantage_PG / SCALES[scale](reward_PG, advantage_PG, applies_PG, sum_over_ranks)
    return advantage_PG.flatten().to(torch.float32)


def normalized_rewards(by_function: dict[str, Tensor], weights: Mapping[str, float], num_generations: int) -> Tensor:
    """Return the weighted sum of the reward functions, each of which is first centered and scaled within the group.

    The first half of GDPO (arXiv:2601.05242): functions with a wide range do not drown out those with a narrow one, and
    different combinations of rewards stay different. The second half, over the batch, is `group_advantages` of the
    result with scale `batch`: a group's sum is 0 already, so centring by group or by batch is the same.

    Args:
        by_function: the rewards [B] by function name; NaN where a function does not apply, which counts neither in the
            mean and standard deviation of the group nor in the sum.
        weights: the weights of the same functions, by name.

    Returns:
        float64 [B]; exactly 0 in groups where every function gives equal rewards.
    """
    assert by_function.keys() == weights.keys()
    parts = []
    for name, value_B in by_function.items():
        value_PG = _groups(value_B, num_generations)
        applies_PG = ~value_PG.isnan()
        centered_PG = centered(value_PG, applies_PG)
        parts.append(weights[name] * centered_PG / group_scale(value_PG, centered_PG, applies_PG, on_one_rank))
    return torch.stack(parts).sum(0).flatten()


def step_advantages(
    steps: Steps, lengths: list[int], num_generations: int, *, scale: Scale, sum_over_ranks: Total = on_one_rank,
    discount: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return token advantages from step rewards (process supervision: DeepSeekMath, arXiv:2402.03300, section 4.1.3).

    The mean of all step rewards of a group is subtracted from each of them, and the result is divided by `scale` (see
    `group_advantages`; `batch` takes the deviation over all steps on all ranks). A token's advantage is the sum over
    the steps that end at or after it, each of which counts `discount` times as much as the one before. `lengths` are
    in tokens. Returns float32 [B, T], 0 after the last step of a completion.
    """
    assert len(steps) % num_generations == 0
    groups = [
        [(row, end, reward) for row in range(first, first + num_generations) for end, reward in steps[row]]
        for first in range(0, len(steps), num_generations)
    ]
    scaled: Steps = [[] for _ in steps]
    compared = _compared([[reward for *_, reward in group] for group in groups], scale, sum_over_ranks)
    for group, values in zip(groups, compared, strict=True):
        for (row, end, _), value in zip(group, values, strict=False):
            scaled[row].append((end, value))
    return _still_to_come(scaled, lengths, discount).to(torch.float32)


def part_advantages(
    parts: Sequence[Sequence[Part]], lengths: list[int], num_generations: int, scale: Scale,
    sum_over_ranks: Total = on_one_rank,
) -> Tensor:  # fmt: skip
    """Return token advantages from rewards of parts of episodes, [B] by their `Part`: the mean of a role's rewards in a
    group is subtracted from each of them, and the result is divided by `scale` (see `step_advantages`). A token's
    advantage is the weighted sum over the parts that have it. Returns float32 [B, T]."""
    of_role = defaultdict[tuple[int, str], list[tuple[int, Part]]](list)
    for row, of in enumerate(parts):
        for part in of:
            of_role[row // num_generations, part.role].append((row, part))
    compared = _compared([[part.reward for _, part in of] for of in of_role.values()], scale, sum_over_ranks)
    advantages_BT = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
    for found, values in zip(of_role.values(), compared, strict=True):
        for (row, part), value in zip(found, values, strict=False):
            for begin, end, weight in part.spans:
                advantages_BT[row, begin:end] += weight * value
    return advantages_BT.to(torch.float32)


def _compared(rewards: list[list[float]], scale: Scale, sum_over_ranks: Total) -> list[list[float]]:
    """Return each list minus its mean, divided by `scale`; zeros follow it."""
    widest = max(1, *map(len, rewards)) if rewards else 1
    reward_PN = torch.tensor([of + [0.0] * (widest - len(of)) for of in rewards], dtype=torch.float64).view(-1, widest)
    applies_PN = torch.arange(widest) < torch.tensor([len(of) for of in rewards])[:, None]
    centered_PN = centered(reward_PN, applies_PN)
    return (centered_PN / SCALES[scale](reward_PN, centered_PN, applies_PN, sum_over_ranks)).tolist()


def reward_to_go_advantages(
    whole_B: Tensor, steps: Steps, lengths: list[int], num_generations: int, *, baseline: Baseline, scale: Scale,
    sum_over_ranks: Total = on_one_rank, discount: float = 1.0, weight_BT: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return token advantages from rewards to go, relative to the group's rewards to go at the same token.

    Let o be the reward of the whole completion, and g_t the sum of the rewards of its steps that end at or after token
    t (0 after the completion's end). The advantage of token t is (o - baseline of o + g_t - baseline of g_t) / scale.
    A token cannot change earlier rewards, and a baseline may depend on the token's position, so this is still the
    gradient of the expected sum of all rewards: G(PO)MDP (Baxter and Bartlett 2001) with a baseline for every time step
    (Peters and Schaal 2008, "Reinforcement learning of motor skills with policy gradients"). Without steps this is
    `group_advantages`. With a `discount`, each step in g_t counts `discount` times as much as the step before,
    and each step is trained for the discounted sum from itself on.

    `scale` is defined as in `group_advantages`, but computed at the token where the group's numbers vary most, since
    completions with equal sums may have earned them at different tokens. `whole_B` is o; it is NaN for completions
    without a reward, which no baseline includes. `weight_BT` (or [B, 1]) are the weights of baselines `length` and
    `optimal`. Returns float32 [B, T], undefined after a completion's end.
    """
    whole_PG = _groups(whole_B, num_generations)
    applies_PG = ~whole_PG.isnan()
    to_go_PTG = _still_to_come(steps, lengths, discount).view(len(whole_PG), num_generations, -1).transpose(1, 2)

    def of_tokens(value_B: Tensor) -> Tensor:
        return value_B.view(len(whole_PG), num_generations, -1).transpose(1, 2).expand_as(to_go_PTG).flatten(0, 1)

    applies_XG = of_tokens(applies_PG.flatten())
    weight_XG = None if weight_BT is None else of_tokens(weight_BT)
    values_XG = to_go_PTG.flatten(0, 1), of_tokens(whole_PG.flatten())
    # The two parts are compared one by one, so that equal rewards are found to be equal.
    centered_2XG = torch.stack([centered(value_XG, applies_XG) for value_XG in values_XG])
    advantage_2XG = torch.stack([BASELINES[baseline](value_XG, applies_XG, weight_XG) for value_XG in values_XG])
    centered_PTG, advantage_PTG = (both.sum(0).view_as(to_go_PTG) for both in (centered_2XG, advantage_2XG))
    at = torch.arange(len(whole_PG)), centered_PTG.square().sum(2).argmax(1)
    value_PG = to_go_PTG[at] + whole_PG
    advantage_PTG = advantage_PTG / SCALES[scale](value_PG, advantage_PTG[at], applies_PG, sum_over_ranks)[..., None]
    return advantage_PTG.transpose(1, 2).flatten(0, 1).to(torch.float32)


def _still_to_come(steps: Steps, lengths: list[int], discount: float) -> Tensor:
    """Return each token's sum over the steps that end at or after it, discounted from step to step, float64 [B, T]."""
    assert len(steps) == len(lengths)
    assert all(1 <= end <= length for row, length in zip(steps, lengths, strict=True) for end, _ in row)
    at_end_BT = torch.zeros(len(steps), max(lengths), dtype=torch.float64)
    places = [(row, end - 1, value) for row, ends in enumerate(steps) for end, value in ends]
    if not places:
        return at_end_BT
    rows, tokens, values = zip(*places, strict=True)
    index = (torch.tensor(rows), torch.tensor(tokens))
    at_end_BT.index_put_(index, torch.tensor(values, dtype=torch.float64), accumulate=True)
    if discount == 1:
        return at_end_BT.flip(1).cumsum(1).flip(1)
    passed_on_BT = torch.ones_like(at_end_BT)
    passed_on_BT[index] = discount
    for t in reversed(range(at_end_BT.shape[1] - 1)):
        at_end_BT[:, t] += passed_on_BT[:, t] * at_end_BT[:, t + 1]
    return at_end_BT


def informative(reward_B: Tensor, num_generations: int, steps: Steps | None = None) -> Tensor:
    """Return whether the rewards of each group (NaN means no reward) differ, bool [P]; DAPO's eq. 11 keeps such groups.
    With `steps`, groups that earned the same sum at different tokens are informative too."""
    reward_PG = reward_B.view(-1, num_generations)
    differs_P = differ(reward_PG, ~reward_PG.isnan())
    if steps is None:
        return differs_P
    earned = [None if missing else row for missing, row in zip(reward_B.isnan().tolist(), steps, strict=True)]
    groups = [earned[i : i + num_generations] for i in range(0, len(earned), num_generations)]
    ways_P = [len({tuple(row) for row in group if row is not None}) for group in groups]
    return differs_P | (torch.tensor(ways_P, dtype=torch.int64) > 1)


def _groups(value_B: Tensor, num_generations: int) -> Tensor:
    assert num_generations >= 2 and value_B.numel() % num_generations == 0
    return value_B.to(torch.float64).view(-1, num_generations)


def overlong_penalty(lengths: Sequence[int], max_completion_tokens: int, buffer: int, factor: float) -> list[float]:
    """Return what to add to each completion's reward for its length in tokens: 0 up to `max_completion_tokens - buffer`
    tokens, falling linearly to `-factor` at `max_completion_tokens`. With `buffer` 0 it is 0 for all completions."""
    free = max_completion_tokens - buffer
    return [factor * min(0.0, max(-1.0, (free - length) / buffer)) if buffer else 0.0 for length in lengths]
