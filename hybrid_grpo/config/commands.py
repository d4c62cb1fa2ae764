"""The configuration of supervised fine-tuning, and the base of those of commands that read recipes."""

from dataclasses import field
from typing import Annotated, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import About
from hybrid_grpo.config.data import DataConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count
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
    def _check_agreement(self) -> Self:
        refuse_mixture(self.data, "sft")
        for name in ("eval_path", "eval_split", "eval_limit"):
            refuse(
                getattr(self.data, name) is not None,
                f"data.{name} is set, but sft does not evaluate: remove it, and use `hybrid-grpo eval` on the result",
            )
        return self
