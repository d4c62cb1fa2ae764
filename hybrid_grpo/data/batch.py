"""The records that the stages hand to each other, and the legend of shapes.

Letters behind a name are its dimensions, here and everywhere in the package:

    P  prompts of a rollout on this rank          S  tokens of a forward's rows, right-padded
    G  completions per prompt                     T  completion tokens, right-padded
    B  = P * G rows, group after group            V  vocabulary
    b  rows of one micro-batch                    N  real completion tokens of a micro-batch, flat
    D  hidden size

Three log-probabilities keep three names: `logp` (the policy as it is now), `old_logp` (the policy that
sampled) and `ref_logp` (the reference). All are natural logarithms at the sampling temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import torch
from torch import Tensor

from hybrid_grpo.model.attention import Segments, Selection

Message = dict[str, Any]
"""One chat message: `{"role": ..., "content": ...}`."""

Numbers = dict[str, tuple[float | Tensor, float]]
"""What a stage measured: value and count by the metric's name. The count is how many items the value averages; a value
of count 0 is left out. Tensors have no dimension and are read later, so that nothing waits for the GPU."""

Step = tuple[int, float]
"""The reward of one step of a completion: the number of its tokens up to the end of the step, and the reward."""


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, ready to be completed."""

    id: int
    """Row number in its source: names the prompt in logs, and is part of its completions' random streams."""
    text: str | list[Message]
    """The prompt as the data set has it (a system message added): what reward functions receive."""
    token_ids: list[int]
    """The prompt as the model reads it."""
    columns: dict[str, Any]
    """All other columns of the row, for the reward functions."""
    epoch: int = 0
    """Pass over the data in which it was drawn: tells two draws of one row in the same step apart."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation."""

    token_ids: list[int]
    """Sampled tokens; the end-of-sequence or stop token, where there was one, is the last."""
    logp: list[float]
    """Log-probability of each token under the softmax at the sampling temperature, recorded while sampling."""
    finish: Literal["stop", "length"]
    """Ended by itself, or cut at the limit."""
    text: str = ""
    """Decoded without special tokens."""


@dataclass(frozen=True)
class Rollout:
    """All completions of one step on this rank; a group is `num_generations` rows that follow each other."""

    prompts: list[Prompt]
    """[P]"""
    completions: list[Completion]
    """[B], group after group."""
    num_generations: int
    """G"""

    @property
    def row_prompts(self) -> list[Prompt]:
        """[B], the prompt of every row."""
        return [prompt for prompt in self.prompts for _ in range(self.num_generations)]

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all rows."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def lengths(self) -> list[int]:
        """[B], tokens of every completion."""
        return [len(completion.token_ids) for completion in self.completions]

    @property
    def mask_BT(self) -> Tensor:
        """bool, True on the tokens of each completion; T is the longest."""
        return torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]

    @property
    def logp_BT(self) -> Tensor:
        """float32, recorded while sampling; 0 on padding."""
        logp_BT = torch.zeros(len(self.completions), max(self.lengths))
        for row, completion in enumerate(self.completions):
            logp_BT[row, : len(completion.logp)] = torch.tensor(completion.logp)
        return logp_BT

    def groups(self, chosen: Sequence[int]) -> Rollout:
        """The chosen groups, in the order given."""
        rows = _rows(chosen, self.num_generations)
        return Rollout([self.prompts[p] for p in chosen], [self.completions[row] for row in rows], self.num_generations)

    def joined(self, more: Rollout) -> Rollout:
        """Its groups, then those of `more`."""
        return Rollout(self.prompts + more.prompts, self.completions + more.completions, self.num_generations)


class RewardStatus(IntEnum):
    """What came of a reward function and a completion."""

    SCORED = 0
    NOT_APPLICABLE = 1
    FAILED = 2
    TIMED_OUT = 3
    """Failed, by taking too long."""


@dataclass(frozen=True)
class Scores:
    """What the reward functions said of a rollout."""

    reward_B: Tensor
    """float64, weighted sum of the functions that apply; NaN where one failed: such a completion has no reward, and
    takes no part in its group."""
    by_function: dict[str, Tensor]
    """float64 [B] by function name, unweighted; NaN where the function does not apply or failed. Of one that scores
    steps it is their sum."""
    status: dict[str, Tensor]
    """int8 [B] by function name, a `RewardStatus`."""
    steps: list[list[Step]] | None = None
    """[B], weighted rewards of the steps of each completion, by rising `end`; None where no function scores steps."""
    whole_B: Tensor | None = None
    """float64, the part of `reward_B` that is of completions as a whole, not of steps; None where `steps` is."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """[B] by FUNCTION/NAME: what functions want to be stored with the completions."""
    failures: dict[str, list[str | None]] = field(default_factory=dict)
    """[B] by function name, of functions that failed: why, and None where one did not."""

    @property
    def outcome_B(self) -> Tensor:
        """float64, the rewards of completions as a whole."""
        return self.reward_B if self.whole_B is None else self.whole_B

    def groups(self, chosen: Sequence[int], num_generations: int) -> Scores:
        """Those of the chosen groups, in the order given."""
        rows = _rows(chosen, num_generations)
        return Scores(
            self.reward_B[rows],
            {name: value_B[rows] for name, value_B in self.by_function.items()},
            {name: status_B[rows] for name, status_B in self.status.items()},
            None if self.steps is None else [self.steps[row] for row in rows],
            None if self.whole_B is None else self.whole_B[rows],
            {name: [stored[row] for row in rows] for name, stored in self.extra.items()},
            {name: [why[row] for row in rows] for name, why in self.failures.items()},
        )

    def joined(self, more: Scores) -> Scores:
        """Its rows, then those of `more`."""
        scores_steps = self.steps is not None or more.steps is not None
        return Scores(
            torch.cat([self.reward_B, more.reward_B]),
            {name: torch.cat([value_B, more.by_function[name]]) for name, value_B in self.by_function.items()},
            {name: torch.cat([status_B, more.status[name]]) for name, status_B in self.status.items()},
            [*(self.steps or self._no_steps()), *(more.steps or more._no_steps())] if scores_steps else None,
            torch.cat([self.outcome_B, more.outcome_B]) if scores_steps else None,
            self._lists(self.extra, more, more.extra),
            self._lists(self.failures, more, more.failures),
        )

    def _lists(self, ours: dict[str, list[Any]], more: Scores, theirs: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Those of our rows, then theirs; None where one side has none."""
        none, nor = [None] * len(self.reward_B), [None] * len(more.reward_B)
        return {name: ours.get(name, none) + theirs.get(name, nor) for name in {**ours, **theirs}}

    def _no_steps(self) -> list[list[Step]]:
        return [[] for _ in self.reward_B]


def _rows(groups: Sequence[int], num_generations: int) -> list[int]:
    """Rows of these groups, where groups follow each other."""
    return [group * num_generations + k for group in groups for k in range(num_generations)]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward, and which tokens it predicts. The last token of a row predicts nothing and is left out.

    Packed, the tokens of all rows stand in one sequence, prompts shared by a group once; else a row is a sequence,
    right-padded, where no real token attends to padding.
    """

    rows: list[int]
    """[b], index of each row in the rollout."""
    input_ids_bS: Tensor
    """int64; b is 1 when packed."""
    position_ids_bS: Tensor
    """int64, place of each token in its own row."""
    source: Selection
    """Picks of all [b * S] tokens those before each completion token, row after row."""
    target_N: Tensor
    """int64, the completion tokens, row after row."""
    mask_bT: Tensor
    """bool, True on the real tokens of each completion."""
    segments: Segments | None
    """Who attends to whom when packed."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What `LogprobModel` takes, but for the temperature."""
        return self.input_ids_bS, self.position_ids_bS, self.source, self.target_N, self.segments

    def unflatten(self, values_N: Tensor) -> Tensor:
        """[b, T] with the flat values at the real tokens and 0 elsewhere; gradients flow."""
        return torch.zeros_like(self.mask_bT, dtype=values_N.dtype).masked_scatter(self.mask_bT, values_N)


@dataclass(frozen=True)
class TrainBatch:
    """A micro-batch with what the loss needs beside the current log-probabilities."""

    micro: MicroBatch
    sampler_logp_bT: Tensor
    """float32, recorded while sampling."""
    old_logp_bT: Tensor | None
    """float32; None where the policy is still the one that sampled: its own, without a gradient, are taken."""
    ref_logp_bT: Tensor | None
    """float32; None without a reference."""
    advantages_bT: Tensor
    """float32"""
    weight_bT: Tensor
    """float32, weight of each token's loss: the mask over the global denominator, 0 on tokens that do not count."""
