"""Balances training: which rank trains on which group of a step, and how groups travel there and results back home.

Sampling leaves ranks with different numbers of tokens, and in training they wait for each other in every micro-batch.
So groups are assigned by their cost, longest first, each to the rank with the lowest load (Graham, SIAM J. Appl. Math.
17, 1969). A group stays whole and in its minibatch, and the loss and its gradient are the same up to rounding. All else
in a step uses the groups on the ranks that sampled them, which are their homes.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.data.batch import Rollout, Scores

_WORTH_MOVING = 0.97
"""Highest cost of the slowest rank, as a share of the cost without an exchange, at which groups move."""
_FORWARD = 1 / 3
"""Cost of a forward, as a share of the cost of a forward and a backward."""


@dataclass(frozen=True)
class Assignment:
    """The ranks that train on the groups of a step, which was sampled on R ranks with P groups each."""

    target_rank_RP: list[list[int]]
    """The rank that trains on each group, by the group's home."""
    num_minibatches: int
    rank: int
    """This rank."""
    exchange: Callable[[list[Any]], list[Any]]
    """Sends an object to each rank, and returns what the ranks sent here, in rank order. Collective."""

    @property
    def moves(self) -> bool:
        """Whether any group leaves its home; the same on every rank."""
        return any(taker != home for home, takers in enumerate(self.target_rank_RP) for taker in takers)

    def scatter(self, rollout: Rollout, scores: Scores) -> tuple[Rollout, Scores]:
        """Return the groups that this rank trains on, and their scores, by minibatch, given its own. Collective."""
        if not self.moves:
            return rollout, scores
        size, sent = rollout.num_generations, []
        for rank in range(len(self.target_rank_RP)):
            chosen = [group for group, taker in enumerate(self.target_rank_RP[self.rank]) if taker == rank]
            sent.append((rollout.groups(chosen), scores.groups(chosen, size)))
        rollouts, scores_of = zip(*self.exchange(sent), strict=True)
        minibatches = [minibatch for minibatch, _ in self.taken]
        order = sorted(range(len(minibatches)), key=minibatches.__getitem__)
        counts = [minibatches.count(minibatch) for minibatch in range(self.num_minibatches)]
        taken = replace(reduce(Rollout.joined, rollouts).groups(order), minibatch_groups=counts)
        return taken, reduce(Scores.joined, scores_of).groups(order, size)

    def gather_tokens(self, value_BT: Tensor, trained: Rollout, rollout: Rollout) -> Tensor:
        """Undo `scatter`: return numbers of the tokens of `rollout`, given those of `trained`, [B, T]. Collective."""
        if not self.moves:
            return value_BT
        size, lengths, values = rollout.num_generations, trained.lengths, value_BT.cpu().numpy()
        sent: list[list[Any]] = [[] for _ in self.target_rank_RP]
        # In order of minibatches; of one home, these groups are in order too.
        for group, (_, home) in enumerate(sorted(self.taken, key=lambda taken: taken[0])):
            rows = slice(group * size, (group + 1) * size)
            sent[home].append(values[rows, : max(lengths[rows])])
        found = list(map(iter, self.exchange(sent)))
        home_BT = torch.zeros(len(rollout.completions), max(rollout.lengths))
        for group, taker in enumerate(self.target_rank_RP[self.rank]):
            value_GT = next(found[taker])
            home_BT[group * size : (group + 1) * size, : value_GT.shape[1]] = torch.from_numpy(value_GT)
        return home_BT

    @property
    def taken(self) -> list[tuple[int, int]]:
        """The (minibatch, home) of the groups that this rank trains on, in order of homes."""
        share = len(self.target_rank_RP[0]) // self.num_minibatches
        return [
            (group // share, home)
            for home, takers in enumerate(self.target_rank_RP)
            for group, taker in enumerate(takers)
            if taker == self.rank
        ]


def assign(
    cost_RP: Tensor, idle_RP: Tensor, num_minibatches: int, may_move: bool = True
) -> tuple[list[list[int]], float]:
    """Assign the groups of R ranks, P of each, to ranks, so that each minibatch costs all ranks about the same.

    Groups without a gradient run in micro-batches of their own (see `backward_parts`), so they are spread separately.

    Args:
        cost_RP: float64, the positive cost of training on each group.
        idle_RP: bool, True for groups that probably have no gradient.
        num_minibatches: a divisor of P; consecutive groups are in the same minibatch.
        may_move: False to leave every group at its home.

    Returns:
        The rank that trains on each group, [R][P]: its home, unless moving is worth its while; and the mean cost of the
        ranks over that of the slowest. Every rank gets a group of each minibatch.
    """
    ranks, groups = cost_RP.shape
    cost_RMN = (cost_RP * torch.where(idle_RP, _FORWARD, 1.0)).view(ranks, num_minibatches, -1).tolist()
    idle_RMN = idle_RP.view(ranks, num_minibatches, -1).tolist()
    target_rank_RP = [[0] * groups for _ in range(ranks)]
    before = after = mean = 0.0
    for minibatch in range(num_minibatches):
        for idle in (False, True):
            members = sorted(
                (-cost, rank, place) for rank in range(ranks) for place, cost in enumerate(cost_RMN[rank][minibatch])
                if idle_RMN[rank][minibatch][place] == idle
            )  # fmt: skip
            own, loads = [0.0] * ranks, [(0.0, rank) for rank in range(ranks)]
            for minus_cost, home, place in members:
                load, taker = loads[0]
                heapq.heapreplace(loads, (load - minus_cost, taker))
                target_rank_RP[home][minibatch * (groups // num_minibatches) + place] = taker
                own[home] -= minus_cost
            before, after = before + max(own), after + max(loads)[0]
            mean += sum(own) / ranks
    # Of two groups a rank or more, one kind has enough for all ranks; with one group a rank, nothing is gained.
    if may_move and after < _WORTH_MOVING * before:
        return target_rank_RP, mean / after
    return [[rank] * groups for rank in range(ranks)], mean / before
