"""The records that the stages hand to each other, and the legend of shapes.

Letters behind a name are its dimensions, here and everywhere in the package:

    P  prompts of a rollout on this rank          S  prompt + completion tokens, right-padded
    G  completions per prompt                     T  completion tokens, right-padded
    B  = P * G rows, group after group            V  vocabulary
    b  rows of one micro-batch                    N  real completion tokens of a micro-batch, flat
    D  hidden size

Three log-probabilities keep three names: `logp` (the policy as it is now), `old_logp` (the policy that
sampled) and `ref_logp` (the reference). All are natural logarithms at the sampling temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Message = dict[str, Any]
"""One chat message: `{"role": ..., "content": ...}`."""


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


@dataclass(frozen=True)
class Scores:
    """What the reward functions said of a rollout."""

    reward_B: Tensor
    """float64, weighted sum of the functions that apply."""
    by_function: dict[str, Tensor]
    """float64 [B] by function name, unweighted; NaN where the function does not apply."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward: token sequences, right-padded, and which of their tokens are predicted."""

    rows: list[int]
    """[b], index of each row in the rollout."""
    input_ids_bS: Tensor
    """int64, prompt followed by completion; padding is never attended to, being to the right."""
    target_mask_bS: Tensor
    """bool, True on completion tokens."""
    mask_bT: Tensor
    """bool, the same tokens moved to the left: True on the real tokens of each completion."""

    def unflatten(self, values_N: Tensor) -> Tensor:
        """[b, T] with the flat values at the real tokens and 0 elsewhere; gradients flow."""
        return torch.zeros_like(self.mask_bT, dtype=values_N.dtype).masked_scatter(self.mask_bT, values_N)


@dataclass(frozen=True)
class TrainBatch:
    """A micro-batch with what the loss needs beside the current log-probabilities."""

    micro: MicroBatch
    old_logp_bT: Tensor
    """float32"""
    ref_logp_bT: Tensor | None
    """float32; None without a reference."""
    advantages_b: Tensor
    """float32"""
    weight_bT: Tensor
    """float32, weight of each token's loss: the mask over the global denominator, 0 on padding."""
