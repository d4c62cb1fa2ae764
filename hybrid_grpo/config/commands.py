"""The configurations of the other training stages, and the base of those of commands that read recipes."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import About
from hybrid_grpo.config.data import DataConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, NotNegative, Text, Whole
from hybrid_grpo.config.train import ModelRunConfig


class RecipeReader:
    """Base class for the configuration of a command that reads training recipes and uses only part of them.

    The configuration has the sections that the command uses; the rest of a recipe is ignored. A setting that the
    command does not use (`About.unused_by`) is refused if it is given on the command line or in Python.
    """

    command = ""


def refuse_mixture(data: DataConfig, command: str) -> None:
    """Refuse a mixture of sources for a command that reads only one. Raises UserError."""
    refuse(
        bool(data.mixture),
        f"data.mixture is for train: {command} reads one source: remove it, and set data.path or data.task",
    )


@dataclass(frozen=True, config=SECTION)
class SftLoopConfig:
    """Batches and targets of supervised fine-tuning."""

    batch_size: Annotated[Count, About(rank=2)] = 64
    """Number of rows in one optimizer step, over all ranks."""
    max_completion_tokens: Count = 512
    """Maximum number of tokens of a target; rows with a longer one are dropped and counted."""


@dataclass(frozen=True, config=SECTION)
class SftConfig(ModelRunConfig):
    """Supervised fine-tuning, on the same engine as GRPO training."""

    sft: SftLoopConfig = field(default_factory=SftLoopConfig)

    command = "sft"

    @model_validator(mode="after")
    def _check_agreement(self) -> SftConfig:
        refuse_mixture(self.data, "sft")
        for name in ("eval_path", "eval_split", "eval_limit"):
            refuse(
                getattr(self.data, name) is not None,
                f"data.{name} is set, but sft does not evaluate: remove it, and use `hybrid-grpo eval` on the result",
            )
        return self


@dataclass(frozen=True, config=SECTION)
class RewardLoopConfig:
    """Batches, loss and columns of reward model training."""

    about = About(rank=4)
    batch_size: Annotated[Count, About(rank=2)] = 64
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


@dataclass(frozen=True, config=SECTION)
class RewardStageConfig(ModelRunConfig):
    """Training of a reward model on pairs of answers."""

    reward: RewardLoopConfig = field(default_factory=RewardLoopConfig)
    eval: PairEvalConfig = field(default_factory=PairEvalConfig)

    command = "reward"

    @model_validator(mode="after")
    def _check_agreement(self) -> RewardStageConfig:
        data, default = self.data, DataConfig()
        for name, instead in (("max_prompt_tokens", "max_tokens"), ("completion_column", "chosen_column")):
            refuse(
                getattr(data, name) != getattr(default, name),
                f"data.{name} {getattr(data, name)} is not for pairs of texts: remove it, and set reward.{instead}",
            )
        columns = [data.prompt_column, *(getattr(self.reward, f"{name}_column") for name in ("chosen", "rejected"))]
        twice = next((name for name in columns if columns.count(name) > 1), None)
        refuse(
            twice is not None,
            f"reward.chosen_column {columns[1]}, reward.rejected_column {columns[2]} and data.prompt_column"
            f" {columns[0]} are not three columns: change one",
        )
        if data.eval_path is None and data.eval_split is None:
            for setting, value in (("eval.every", self.eval.every), ("data.eval_limit", data.eval_limit)):
                refuse(bool(value), f"{setting} {value} needs held-out pairs: set data.eval_path or data.eval_split")
        return self
