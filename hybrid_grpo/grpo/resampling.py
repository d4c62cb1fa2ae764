"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): which groups of a step are kept, and which are replaced.

Every group of a step has a slot, counted over all ranks. A group with equal rewards teaches nothing, and gives its slot
to the first of its candidates that teaches something. Candidates belong to slots rather than to ranks, and are drawn
from the common stream of prompts, so the same groups are kept on any number of ranks. No group moves to another rank.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_grpo.data.batch import Numbers, Prompt, Rollout, Scores
from hybrid_grpo.grpo.advantages import Total, informative


def group_slots(prompts_per_rank: int, num_minibatches: int, rank: int, ranks: int) -> list[int]:
    """Return the slots of a rank's groups: slots number all ranks' groups, ordered by minibatch and then by rank."""
    share = prompts_per_rank // num_minibatches
    return [
        (minibatch * ranks + rank) * share + group for minibatch in range(num_minibatches) for group in range(share)
    ]


class GroupSlots:
    """The slots of a step's groups, and which slots are open because their groups teach nothing. `mine` lists the slots
    of this rank's groups, `count` is the number of slots over all ranks, and `sum_over_ranks` sums over ranks."""

    def __init__(self, mine: list[int], count: int, sum_over_ranks: Total) -> None:
        self._mine, self._count, self._sum_over_ranks = mine, count, sum_over_ranks
        self._sampled = count
        self._informative = 0
        self.open: list[int] = list(range(count))

    def close(self, teaches_P: Tensor, informative: int) -> None:
        """Record a round. `teaches_P` says, for each slot of this rank, whether the group now in it teaches something;
        `informative` is the number of groups that this rank sampled in this round and that teach something."""
        closed = torch.zeros(self._count + 1, dtype=torch.int64)
        closed[self._mine] = teaches_P.to(torch.int64)
        closed[-1] = informative
        *slots, count = self._sum_over_ranks(closed).tolist()
        self._informative += count
        self.open = [slot for slot, taken in enumerate(slots) if not taken]

    def candidates(self) -> tuple[int, list[int], list[int]]:
        """Decide which prompts to draw as replacements for groups that teach nothing.

        Every open slot gets as many candidates as a slot needs on average; in total, no more are drawn than a step has
        groups. Returns how many candidates all ranks draw together; the indices of this rank's candidates among all
        that are drawn; and, for each of these, the group on this rank that it may replace.
        """
        needed = math.ceil(self._sampled / self._informative) if self._informative else self._count
        each = min(self._count // len(self.open), needed)
        drawn = each * len(self.open)
        self._sampled += drawn
        group_of = {slot: group for group, slot in enumerate(self._mine)}
        wanted = [number for number in range(drawn) if self.open[number % len(self.open)] in group_of]
        return drawn, wanted, [group_of[self.open[number % len(self.open)]] for number in wanted]


def resample(
    rollout: Rollout,
    scores: Scores,
    mine: list[int],
    *,
    slots: int,
    sum_over_ranks: Total,
    draw: Callable[[int, list[int]], list[Prompt]],
    sample: Callable[[list[Prompt]], tuple[Rollout, Scores]],
    max_rounds: int,
) -> tuple[Rollout, Scores, Numbers]:
    """Replace groups that teach nothing by groups of other prompts, until none is left or for `max_rounds` rounds.

    Groups are judged by the reward before penalties for length or KL (DAPO eq. 11). Every rank takes part in every
    round, even if it needs no replacements, and keeps its number of groups.

    Args:
        rollout, scores: the step's first rollout on this rank, and its scores.
        mine, slots, sum_over_ranks: see `GroupSlots`.
        draw: takes the number of prompts to draw over all ranks and the indices of the prompts that this rank wants,
            and returns these prompts.
        sample: takes a list of prompts, which may be empty, and returns a rollout of them and its scores. Collective.
    """
    groups, group_size = len(rollout.prompts), rollout.num_generations
    held = GroupSlots(mine, slots, sum_over_ranks)
    teaches_P = informative(scores.reward_B, group_size, scores.steps)
    held.close(teaches_P, int(teaches_P.sum()))
    sampled, informative_groups, rounds = groups, int(teaches_P.sum()), 0
    while held.open and rounds < max_rounds:
        drawn, wanted, replaces = held.candidates()
        more, more_scores = sample(draw(drawn, wanted))
        teaches_C = informative(more_scores.reward_B, group_size, more_scores.steps)
        # By group, the first of its candidates that teaches something.
        chosen: dict[int, int] = {}
        for candidate in teaches_C.nonzero().flatten().tolist():
            chosen.setdefault(replaces[candidate], candidate)
        order = [groups + chosen[group] if group in chosen else group for group in range(groups)]
        rollout = rollout.joined(more).groups(order)
        scores = scores.joined(more_scores).groups(order, group_size)
        teaches_P[list(chosen)] = True
        held.close(teaches_P, int(teaches_C.sum()))
        sampled += len(teaches_C)
        informative_groups += int(teaches_C.sum())
        rounds += 1
    numbers: Numbers = {"group/informative_frac": (informative_groups / sampled, sampled)}
    numbers["group/resample_rounds"] = (rounds, 1)
    if rounds:
        numbers["group/resampled"] = (sampled - groups, 1)
    return rollout, scores, numbers
