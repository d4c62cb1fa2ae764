"""The pretraining loss of a run: next-token prediction on texts, beside what the policy learns from its rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hybrid_grpo.config import PtxConfig
from hybrid_grpo.data.batch import Numbers
from hybrid_grpo.data.loader import PromptLoader
from hybrid_grpo.data.texts import read_texts
from hybrid_grpo.distributed import rank, world_size

if TYPE_CHECKING:
    from hybrid_grpo.policy import Policy


class PretrainingLoss:
    """`coef` times the mean cross-entropy of the tokens of a batch of texts (arXiv:2203.02155, equation 2).

    Every optimizer step draws the next batch, in a seeded order that does not depend on the number of ranks. Raises
    UserError as `read_texts` does.

    Attributes:
        loader: the rows of tokens, the same on every rank; its position is part of a checkpoint.
        fact: what was read, in a line.
    """

    def __init__(self, config: PtxConfig, tokenizer: Any, seed: int) -> None:
        self._coef = config.coef
        self.rows, self.fact = read_texts(config, tokenizer)
        self.loader = PromptLoader(self.rows, config.rows_per_step, rank(), world_size(), seed, section="ptx")

    def add_gradient(self, policy: Policy, beat: Callable[[], None]) -> Numbers:
        """Add the gradient of the next batch to that of the coming optimizer step; returns the loss without its
        coefficient. `beat` is called before each micro-batch. Collective."""
        rows = [row for row, _ in self.loader.next_batch()]
        parts = list(policy.learn([row[:1] for row in rows], [row[1:] for row in rows], beat, self._coef))
        tokens = sum(count for _, count in parts)
        return {"ptx/loss": (sum(loss * count for loss, count in parts) / tokens, tokens)}
