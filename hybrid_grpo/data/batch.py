"""The records that the stages pass to each other, and the legend of shapes.

Letters after a name are its dimensions, here and everywhere in the package:

    P  prompts of a rollout on this rank          S  tokens of the rows of a forward, right-padded
    G  completions per prompt                     T  completion tokens, right-padded
    B  = P * G rows, group after group            V  vocabulary
    b  rows of one micro-batch                    N  real completion tokens of a micro-batch, flat
    D  hidden size

Three log-probabilities keep three names: `logp` (the current policy), `old_logp` (the policy that sampled) and
`ref_logp` (the reference). All are natural logarithms at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid_grpo.data.completion import Completion, Prompt
from hybrid_grpo.model.attention import Batch
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.model.sight import ImageInputs, VisionEncoder
from hybrid_grpo.model.upload import Selection

if TYPE_CHECKING:
    from hybrid_grpo.data.picture import Picture

RewardStep = tuple[int, float]
"""The reward of one step of a completion: the number of its tokens up to and including the step, and the reward."""

Numbers = dict[str, tuple[float | Tensor, float | Tensor]]
"""Measurements by metric name: a value, and the number of items that it averages (1 for sums and extremes; a value with
0 items is ignored). Tensors are only read when the step is logged, so that nothing waits for the GPU earlier."""


@dataclass(frozen=True)
class Rollout:
    """All completions of one step on this rank. Each group is `num_generations` consecutive rows."""

    prompts: list[Prompt]
    """[P]"""
    completions: list[Completion]
    """[B], group after group."""
    num_generations: int
    """G"""
    minibatch_groups: Sequence[int] = ()
    """Number of groups in each minibatch, in order; empty if minibatches are of equal size."""

    @property
    def row_prompts(self) -> list[Prompt]:
        """[B], the prompt of each row."""
        return [prompt for prompt in self.prompts for _ in range(self.num_generations)]

    @property
    def pictures(self) -> list[Picture]:
        """The pictures of all prompts, followed by those of all completions."""
        of_prompts = [picture for prompt in self.prompts for picture in prompt.pictures]
        return of_prompts + [picture for completion in self.completions for picture in completion.pictures]

    def token_rows(self, rows: Sequence[int]) -> list[TokenRow]:
        """The chosen rows as a model reads them in training."""
        prompts = self.row_prompts
        return [part for row in rows for part in self.completions[row].token_rows(row, prompts[row].token_ids)]

    @property
    def num_tokens(self) -> int:
        """Total number of completion tokens in all rows."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """[B], the number of tokens of each completion."""
        return [len(completion.token_ids) for completion in self.completions]

    @property
    def mask_BT(self) -> Tensor:
        """bool, True on the tokens of each completion; T is the length of the longest completion."""
        return _begins(self.lengths, max(self.lengths))

    @property
    def logp_BT(self) -> Tensor:
        """float32, the log-probabilities recorded while sampling; 0 on padding."""
        known = [completion.logp for completion in self.completions]
        logp_BT = torch.zeros(len(known), max(self.lengths))
        # All at once: a tensor per row takes ten times as long.
        logp_BT[_begins(list(map(len, known)), max(self.lengths))] = torch.tensor(list(chain.from_iterable(known)))
        return logp_BT

    @property
    def is_old_BT(self) -> Tensor | None:
        """bool, True on tokens that were sampled in earlier steps; None if there are none."""
        old = [completion.old_tokens for completion in self.completions]
        return _begins(old, max(self.lengths)) if any(old) else None

    @property
    def learned(self) -> list[int]:
        """Indices of the rows that are part of the loss."""
        return [row for row, completion in enumerate(self.completions) if completion.learned]

    def first(self, count: int) -> Rollout:
        """The first `count` completions of every group."""
        rows = _first(count, self.num_generations, len(self.completions))
        return Rollout(self.prompts, [self.completions[row] for row in rows], count)

    def groups(self, chosen: Sequence[int]) -> Rollout:
        """The chosen groups, in the order given."""
        rows = _rows(chosen, self.num_generations)
        return Rollout([self.prompts[p] for p in chosen], [self.completions[row] for row in rows], self.num_generations)

    def joined(self, more: Rollout) -> Rollout:
        """The groups of this rollout, followed by those of `more`."""
        return Rollout(self.prompts + more.prompts, self.completions + more.completions, self.num_generations)


class RewardStatus(IntEnum):
    """The outcome of one reward function for one completion."""

    SCORED = 0
    NOT_APPLICABLE = 1
    FAILED = 2
    TIMED_OUT = 3
    """The function took too long; counted separately from other failures."""


@dataclass(frozen=True)
class Scores:
    """The rewards of a rollout."""

    reward_B: Tensor
    """float64, the weighted sum over the functions that apply. NaN if one of them failed: the completion then has no
    reward and is left out of its group."""
    by_function: dict[str, Tensor]
    """float64 [B] by function name, unweighted; NaN for rows to which the function does not apply or on which it
    failed. For a function that scores steps, the sum over the steps."""
    status: dict[str, Tensor]
    """int8 [B] by function name, a `RewardStatus`."""
    steps: list[list[RewardStep]] | None = None
    """[B], the weighted rewards of each completion's steps, ordered by their ends; None if no function scores steps."""
    whole_B: Tensor | None = None
    """float64, the part of `reward_B` that is not earned by steps; None if `steps` is None."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """[B] by FUNCTION/NAME: values that functions store with the completions."""
    failures: dict[str, list[str | None]] = field(default_factory=dict)
    """[B] by the name of each function that failed: the reason for each row; None for rows on which it succeeded."""

    @property
    def outcome_B(self) -> Tensor:
        """float64 [B], the rewards without the rewards of steps."""
        return self.reward_B if self.whole_B is None else self.whole_B

    def right_B(self, name: str, prompts: Sequence[Prompt]) -> Tensor:
        """float64 [B], the reward that decides whether each completion of `prompts` ([P]) is right. It is the reward
        from the function `name`. In a mixture, rows to which `name` does not apply get the reward from the first
        function that applies to them."""
        value_B = self.by_function[name]
        of_source = [bool(prompt.source) for prompt in prompts]
        if not any(of_source):
            return value_B
        open_B = torch.tensor(of_source).repeat_interleave(len(value_B) // len(prompts))
        for function in (name, *self.by_function):
            applies_B = open_B & (self.status[function] != RewardStatus.NOT_APPLICABLE)
            value_B = torch.where(applies_B, self.by_function[function], value_B)
            open_B = open_B & ~applies_B
        return value_B

    def groups(self, chosen: Sequence[int], num_generations: int) -> Scores:
        """The scores of the chosen groups, in the order given."""
        return self._of(_rows(chosen, num_generations))

    def first(self, count: int, num_generations: int) -> Scores:
        """The scores of the first `count` completions of every group."""
        return self._of(_first(count, num_generations, len(self.reward_B)))

    def _of(self, rows: list[int]) -> Scores:
        return Scores(
            self.reward_B[rows], {name: value_B[rows] for name, value_B in self.by_function.items()},
            {name: status_B[rows] for name, status_B in self.status.items()},
            None if self.steps is None else [self.steps[row] for row in rows],
            None if self.whole_B is None else self.whole_B[rows],
            {name: [stored[row] for row in rows] for name, stored in self.extra.items()},
            {name: [why[row] for row in rows] for name, why in self.failures.items()},
        )  # fmt: skip

    def joined(self, more: Scores) -> Scores:
        """The rows of these scores, followed by those of `more`."""
        scores_steps = self.steps is not None or more.steps is not None
        return Scores(
            torch.cat([self.reward_B, more.reward_B]),
            {name: torch.cat([value_B, more.by_function[name]]) for name, value_B in self.by_function.items()},
            {name: torch.cat([status_B, more.status[name]]) for name, status_B in self.status.items()},
            [*(self.steps or self._no_steps()), *(more.steps or more._no_steps())] if scores_steps else None,
            torch.cat([self.outcome_B, more.outcome_B]) if scores_steps else None,
            self._lists(self.extra, more, more.extra), self._lists(self.failures, more, more.failures),
        )  # fmt: skip

    def _lists(self, own: dict[str, list[Any]], more: Scores, others: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Join the lists of both sides by name. A side that has no list of some name gets None for its rows."""
        no_own, no_more = [None] * len(self.reward_B), [None] * len(more.reward_B)
        return {name: own.get(name, no_own) + others.get(name, no_more) for name in {**own, **others}}

    def _no_steps(self) -> list[list[RewardStep]]:
        return [[] for _ in self.reward_B]


def _begins(lengths: Sequence[int], longest: int) -> Tensor:
    """[B, longest] bool, True at the first `lengths` positions of each row."""
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


def _rows(groups: Sequence[int], num_generations: int) -> list[int]:
    return [group * num_generations + k for group in groups for k in range(num_generations)]


def _first(count: int, num_generations: int, rows: int) -> list[int]:
    return [first + k for first in range(0, rows, num_generations) for k in range(count)]


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward, and the tokens that it predicts. The last token of a row predicts no token and is left
    out. A rollout's row that is read as several `TokenRow`s has a row here for each, whose mask is True on its part.
    When packed, all rows form one sequence, and a prompt that a group shares occurs in the sequence once. Otherwise
    each row is a right-padded sequence, and no real token attends to padding."""

    rows: list[int]
    """[b], index of each row in the rollout."""
    row_b: Tensor
    """int64, `rows` on the device."""
    input_ids_bS: Tensor
    """int64; b is 1 when packed."""
    position_ids: Tensor
    """int64 [b, S], position of each token in its own row; [axes, b, S] if pictures are placed on several axes."""
    source: Selection
    """Selects, from all b * S tokens, the token that precedes each sampled token, row by row."""
    target_N: Tensor
    """int64, the sampled tokens, row by row."""
    mask_bT: Tensor
    """bool, True on the sampled tokens of each completion."""
    place_N: Tensor
    """int64, the index of each completion token in the flattened mask [b, T]; of a filler that of its dummy token."""
    segments: Batch | None
    """Which tokens attend to which when packed; None for padded rows."""
    sidecars: tuple[Any, ...] = ()
    """What the forward takes beside the tokens; see `Reading.sidecars`."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments of `LogprobModel` except the temperature."""
        tokens = self.input_ids_bS, self.position_ids, self.source, self.target_N
        return *tokens, self.segments, self.sidecars

    def seen_by(self, sight: VisionEncoder) -> MicroBatch:
        """This micro-batch for another model, which sees the pictures by `sight`."""
        seen = (replace(each, sight=sight) if isinstance(each, ImageInputs) else each for each in self.sidecars)
        return replace(self, sidecars=tuple(seen))

    def of_rows(self, values_BT: Tensor) -> Tensor:
        """This micro-batch's rows of the values of a whole rollout: [b, T], or [b, 1] if the values are [B, 1]. A
        filler, which has no rows, gets zeros [1, 1], so that it has the same fields as every other micro-batch."""
        if not self.rows:
            return values_BT.new_zeros(self.mask_bT.shape)
        return values_BT[self.row_b, : self.mask_bT.shape[1]]

    def put(self, values_BT: Tensor, values_N: Tensor) -> None:
        """Write the flat values at the real tokens into the values of a whole rollout."""
        width = self.mask_bT.shape[1]
        values_BT[self.row_b[self.place_N // width], self.place_N % width] = values_N

    def unflatten(self, values_N: Tensor) -> Tensor:
        """[b, T], the flat values at the real tokens and 0 elsewhere; differentiable."""
        # By index, since the backward of a mask would wait for the device to count it.
        zeros = values_N.new_zeros(self.mask_bT.numel())
        return zeros.index_copy(0, self.place_N, values_N).view_as(self.mask_bT)


@torch.no_grad()
def measured(
    engine: Callable[..., Any], batches: list[MicroBatch], shape: tuple[int, int], temperature: float,
    more: Callable[..., tuple[Tensor, ...]] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the log-probability and the entropy of every completion token in `batches`, and what `more` returns for
    it, each float32 [B, T] (`shape`), 0 elsewhere. Collective. `engine` runs a `LogprobModel`, `more` is a
    `HeadFunction`, and every rank has the same number of batches."""
    found_BT: list[Tensor] = []
    for micro in batches:
        values = engine(*micro.inputs, temperature, more)
        found_BT = found_BT or [torch.zeros(shape, device=micro.input_ids_bS.device) for _ in values]
        for value_BT, value_N in zip(found_BT, values if micro.rows else (), strict=False):
            micro.put(value_BT, value_N)
    return found_BT


@dataclass(frozen=True)
class TrainBatch:
    """A micro-batch with everything that the loss needs except the policy's log-probabilities."""

    micro: MicroBatch
    sampler_logp_bT: Tensor
    """float32, recorded while sampling."""
    old_logp_bT: Tensor | None
    """float32; None while the policy is the one that sampled, whose log-probabilities are used without gradient."""
    ref_logp_bT: Tensor | None
    """float32; None without a reference."""
    advantages_bT: Tensor
    """float32"""
    weight_bT: Tensor
    """float32, the weight of each token in the loss: mask over global denominator; 0 if it does not count."""
    writers: dict[str, Tensor] = field(default_factory=dict)
    """bool [b, 1] by the name of each other writer that is learned from, True on that writer's rows. Ratios of these
    rows are relative to the recorded log-probabilities, `sampler_logp_bT`."""
    is_old_bT: Tensor | None = None
    """bool, True on tokens of earlier steps, whose ratios too are relative to `sampler_logp_bT`; None without any."""
    has_gradient: bool = True
    """False if the loss of these rows has the gradient 0, so that a forward is enough."""
    drifts_bT: Tensor | None = None
    """bool, True on the tokens whose drift from `old_logp` is penalized; None for all."""
    correction_mean: float = 1.0
    """What the factors of the sampler's correction are divided by."""
    group_b: Tensor | None = None
    """int64, the group of each row, whose completions are all in this micro-batch; None where groups may be divided."""

    @property
    def own_bT(self) -> Tensor:
        """bool, True on the real tokens that the policy sampled."""
        own_bT = self.micro.mask_bT
        for rows_b1 in self.writers.values():
            own_bT = own_bT & ~rows_b1
        return own_bT
