"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): which groups of a step are sampled anew, and which are kept.

Every group of a step has a place, counted over all ranks. A group that teaches nothing gives its place to the first of
its candidates that teaches something. Candidates belong to places and not to ranks, and are drawn from the common
stream of prompts, so the groups that are kept are the same on any number of ranks. No group changes its rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_grpo.data.batch import Prompt, Rollout, Scores
from hybrid_grpo.distributed import all_reduce, world_size
from hybrid_grpo.grpo.advantages import informative
from hybrid_grpo.run.metrics import Meter


@dataclass(frozen=True)
class Candidates:
    """Prompts to draw in place of groups that teach nothing. The same on every rank but for `wanted`."""

    drawn: int
    """Over all ranks; each open place has as many."""
    wanted: list[int]
    """Those of this rank, by their number among the drawn."""
    groups: list[int]
    """The group on this rank that each of them may replace."""


class Places:
    """The places of a step's groups, and which are open: held by a group that teaches nothing.

    Args:
        mine: the place of each group of this rank.
        total: places over all ranks.
        device: where collectives take place.
    """

    def __init__(self, mine: list[int], total: int, device: torch.device) -> None:
        self._mine = mine
        self._total = total
        self._device = device
        self._sampled = total
        self._informative = 0
        self.open: list[int] = list(range(total))

    def close(self, teaches_P: Tensor, informative: int) -> None:
        """Take note of a round. Collective.

        Args:
            teaches_P: bool, for each group of this rank, whether what holds its place now teaches something.
            informative: groups of this round, on this rank, that do.
        """
        closed = torch.zeros(self._total + 1, dtype=torch.int64)
        closed[self._mine] = teaches_P.to(torch.int64)
        closed[-1] = informative
        *places, count = all_reduce(closed.to(self._device)).tolist()
        self._informative += count
        self.open = [place for place, taken in enumerate(places) if not taken]

    def candidates(self) -> Candidates:
        """For every open place as many as one needs on average, and together no more than a step has groups."""
        needed = math.ceil(self._sampled / self._informative) if self._informative else self._total
        each = min(self._total // len(self.open), needed)
        drawn = each * len(self.open)
        self._sampled += drawn
        group_of = {place: group for group, place in enumerate(self._mine)}
        wanted = [number for number in range(drawn) if self.open[number % len(self.open)] in group_of]
        return Candidates(drawn, wanted, [group_of[self.open[number % len(self.open)]] for number in wanted])


def resample(
    rollout: Rollout,
    scores: Scores,
    mine: list[int],
    *,
    draw: Callable[[int, list[int]], list[Prompt]],
    sample: Callable[[list[Prompt]], tuple[Rollout, Scores]],
    max_rounds: int,
    meter: Meter,
    device: torch.device,
) -> tuple[Rollout, Scores]:
    """Sample other prompts in place of groups that teach nothing, until none is left or `max_rounds` times.

    What counts is the reward as it is, without what is taken off it for length or KL (DAPO eq. 11). Every rank takes
    part in every round, also one that lacks no group.

    Args:
        rollout, scores: of this rank, the first of the step.
        mine: the place of each of its groups.
        draw: from a number of prompts to draw over all ranks, and which of them are wanted here, to those.
        sample: a rollout of prompts, of which there may be none, and its scores. Collective.
        meter: is given what was sampled.
        device: where collectives take place.

    Returns:
        As many groups on each rank as before, and their scores.
    """
    groups, group_size = len(rollout.prompts), rollout.num_generations
    places = Places(mine, groups * world_size(), device)
    teaches_P = informative(scores.reward_B, group_size, scores.steps)
    places.close(teaches_P, int(teaches_P.sum()))
    meter.add("group/informative_frac", teaches_P.double().mean(), groups)
    rounds = 0
    while places.open and rounds < max_rounds:
        candidates = places.candidates()
        more, more_scores = sample(draw(candidates.drawn, candidates.wanted))
        teaches_C = informative(more_scores.reward_B, group_size, more_scores.steps)
        chosen = _first_that_teach(candidates.groups, teaches_C.tolist())
        order = [groups + chosen[group] if group in chosen else group for group in range(groups)]
        rollout = rollout.joined(more).groups(order)
        scores = scores.joined(more_scores).groups(order, group_size)
        teaches_P[list(chosen)] = True
        places.close(teaches_P, int(teaches_C.sum()))
        meter.add("group/informative_frac", teaches_C.double().mean(), len(teaches_C))
        meter.add("group/resampled", len(teaches_C))
        rounds += 1
    meter.add("group/resample_rounds", rounds)
    return rollout, scores


def _first_that_teach(groups: list[int], teaches: list[bool]) -> dict[int, int]:
    """By group, the first of its candidates that teaches something.

    Args:
        groups: the group that each candidate may replace.
        teaches: whether the candidate does.
    """
    chosen: dict[int, int] = {}
    for candidate, group in enumerate(groups):
        if teaches[candidate]:
            chosen.setdefault(group, candidate)
    return chosen
