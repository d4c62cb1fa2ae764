"""Settings of the reward model stage: its pairs, its loss, and what it measures on held-out pairs."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import SECTION, Count, NotNegative, Text, Whole


@dataclass(frozen=True, config=SECTION)
class RewardLoopConfig:
    """Batches, loss and columns of reward model training."""

    batch_size: Count = 64
    """Number of pairs in one optimizer step, over all ranks."""
    max_tokens: Count = 1024
    """Maximum number of tokens in a text, prompt and answer together. Pairs with a longer one are dropped and counted,
    or refused if data.over_long is refuse."""
    center_coefficient: NotNegative = 0.0
    """Weight of a term in the loss that keeps rewards around 0: the squared sum of a pair's two rewards (TRL's
    center_rewards_coefficient, arXiv:2312.09244, equation 2; 0.01 is usual)."""
    chosen_column: Text = "chosen"
    """Column with the better answer: text, or chat messages that end with the assistant's."""
    rejected_column: Text = "rejected"
    """Column with the worse answer."""
    margin_column: Text = "margin"
    """Column with the margin by which the better reward should exceed the worse one, if the rows have it."""


@dataclass(frozen=True, config=SECTION)
class PairEvalConfig:
    """When loss, accuracy and calibration are measured on the held-out pairs."""

    every: Whole = 0
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
