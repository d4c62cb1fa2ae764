"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): which groups of a step are kept, and which are replaced.

Every group of a step has a slot, counted over all ranks. A group with equal rewards teaches nothing, and gives its slot
to the first of its candidates that teaches something. Candidates belong to slots rather than to ranks, and are drawn
from the common stream of prompts, so the same groups are kept on any number of ranks. No group moves to another rank.
"""

import math
from collections.abc import Callable

import torch

from hybrid_grpo.data.batch import Numbers, Prompt, Rollout, Scores
from hybrid_grpo.grpo.advantages import Total, informative


def group_slots(prompts_per_rank: int, num_minibatches: int, rank: int, ranks: int) -> list[int]:
    """Return the slots of a rank's groups: slots number all ranks' groups, ordered by minibatch and then by rank."""
    share = prompts_per_rank // num_minibatches
    return [
        (minibatch * ranks + rank) * share + group for minibatch in range(num_minibatches) for group in range(share)
    ]


def candidates(open_slots: list[int], mine: list[int], each: int) -> tuple[list[int], list[int]]:
    """Deal `each` candidates to every open slot, in turns. Return the indices of this rank's candidates among all that
    are drawn, and the group that each of these may replace; `mine` lists the slots of this rank's groups."""
    group_of = {slot: group for group, slot in enumerate(mine)}
    wanted = [number for number, slot in enumerate(open_slots * each) if slot in group_of]
    return wanted, [group_of[open_slots[number % len(open_slots)]] for number in wanted]


def resample(
    rollout: Rollout, scores: Scores, mine: list[int], *, slots: int, sum_over_ranks: Total,
    draw: Callable[[int, list[int]], list[Prompt]], sample: Callable[[list[Prompt]], tuple[Rollout, Scores]],
    max_rounds: int,
) -> tuple[Rollout, Scores, Numbers]:  # fmt: skip
    """Replace groups that teach nothing by groups of other prompts, until none is left or for `max_rounds` rounds.

    Groups are judged by the reward before penalties for length or KL (DAPO eq. 11). Every rank takes part in every
    round, even if it needs no replacements, and keeps its number of groups. In a round, every slot whose group teaches
    nothing gets as many candidates as a slot has needed on average; in total, no more are drawn than a step has groups.

    Args:
        rollout, scores: the step's first rollout on this rank, and its scores.
        mine: the slots of this rank's groups.
        slots: the number of slots over all ranks.
        draw: takes the number of prompts to draw over all ranks and the indices of the prompts that this rank wants,
            and returns these prompts.
        sample: takes a list of prompts, which may be empty, and returns a rollout of them and its scores. Collective.
    """
    groups, group_size = len(rollout.prompts), rollout.num_generations
    teaches_P = informative(scores.reward_B, group_size, scores.steps)
    sampled, informative_groups, rounds = groups, 0, 0
    sampled_anywhere, informative_anywhere, new = slots, 0, int(teaches_P.sum())
    while True:
        informative_groups += new
        closed = torch.zeros(slots + 1, dtype=torch.int64)
        closed[mine] = teaches_P.to(torch.int64)
        closed[-1] = new
        *taken, new_anywhere = sum_over_ranks(closed).tolist()
        informative_anywhere += new_anywhere
        open_slots = [slot for slot, is_taken in enumerate(taken) if not is_taken]
        if not open_slots or rounds == max_rounds:
            break
        needed = math.ceil(sampled_anywhere / informative_anywhere) if informative_anywhere else slots
        each = min(slots // len(open_slots), needed)
        sampled_anywhere += each * len(open_slots)
        wanted, replaces = candidates(open_slots, mine, each)
        more, more_scores = sample(draw(each * len(open_slots), wanted))
        teaches_C = informative(more_scores.reward_B, group_size, more_scores.steps)
        # By group, the first of its candidates that teaches something.
        chosen = {replaces[candidate]: candidate for candidate in reversed(teaches_C.nonzero().flatten().tolist())}
        order = [groups + chosen[group] if group in chosen else group for group in range(groups)]
        rollout = rollout.joined(more).groups(order)
        scores = scores.joined(more_scores).groups(order, group_size)
        teaches_P[list(chosen)] = True
        new = int(teaches_C.sum())
        sampled += len(teaches_C)
        rounds += 1
    numbers: Numbers = {"group/informative_frac": (informative_groups / sampled, sampled)}
    numbers["group/resample_rounds"] = (rounds, 1)
    if rounds:
        numbers["group/resampled"] = (sampled - groups, 1)
    return rollout, scores, numbers
