"""Settings of the pretraining loss: its weight and its texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse, refuse_indivisible
from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Count, NotNegative, Source, Text
from hybrid_grpo.config.sources import check_source

if TYPE_CHECKING:
    from hybrid_grpo.config.train import TrainConfig


@dataclass(frozen=True, config=SECTION)
class PtxConfig(FeatureConfig):
    """Texts whose next-token loss is added to the policy's loss (PPO-ptx in InstructGPT, arXiv:2203.02155, equation 2),
    so that the policy does not forget what it learned in pretraining. Each optimizer step draws new rows."""

    coef: NotNegative = 0.0
    """Weight of the loss (gamma), which is a mean over the tokens of the rows. If it is 0, the loss is not computed."""
    path: Source = ""
    """File, folder or pattern of files, or hub name, as in `data.path`."""
    subset: Text | None = None
    """Configuration name of a hub dataset."""
    split: Text = "train"
    """Split to read, if the source has splits."""
    column: Text = "text"
    """Column with the text. The tokenizer adds its special tokens, and the end-of-sequence token is appended."""
    limit: Count | None = None
    """Read only this many texts, from the beginning."""
    rows_per_step: Count = 32
    """Rows of one optimizer step, over all ranks."""
    max_tokens: Count = 512
    """Maximum number of tokens of a row; longer texts are split into several rows."""

    section = "ptx"
    feature = "pretraining:PretrainingLoss"

    @property
    def is_on(self) -> bool:
        return self.coef > 0

    def check(self, config: TrainConfig) -> None:
        if not self.is_on:
            self.refuse_idle("without ptx.coef: set ptx.coef")
        refuse(self.is_on and self.path == "", f"ptx.coef {self.coef:g} needs texts: set ptx.path, or ptx.coef to 0")
        refuse(self.max_tokens < 2, "ptx.max_tokens 1 leaves no token to predict: set it to 2 or more")

    def check_place(self, config: TrainConfig, world_size: int) -> None:
        """Raise UserError if the texts do not exist, or the rows do not divide evenly among the ranks."""
        check_source("ptx.path", self.path)
        refuse_indivisible("ptx.rows_per_step", self.rows_per_step, world_size, "ranks")
