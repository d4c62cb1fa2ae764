"""The pretraining loss of a run: next-token prediction on texts, in addition to learning from rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.batch import Numbers
from hybrid_grpo.data.loader import PromptLoader
from hybrid_grpo.data.prompts import require_column
from hybrid_grpo.data.sources import Source, read_rows
from hybrid_grpo.data.special_tokens import text_ids
from hybrid_grpo.features.pretraining.settings import PtxConfig
from hybrid_grpo.model.limits import check_prompt_ids
from hybrid_grpo.model.loading import load_config
from hybrid_grpo.model.ranks import rank, world_size
from hybrid_grpo.run.feature import Feature

if TYPE_CHECKING:
    from hybrid_grpo.policy import Policy
    from hybrid_grpo.run.inputs import RunInputs


class PretrainingLoss(Feature):
    """`coef` times the mean cross-entropy of the tokens in a batch of texts (arXiv:2203.02155, equation 2).

    Each optimizer step draws the next batch, in a seeded order that does not depend on the number of ranks. Raises
    UserError as `read_texts` does.
    """

    name = "ptx"

    def __init__(self, config: TrainConfig, plan: BatchPlan, inputs: RunInputs) -> None:
        super().__init__(config, plan, inputs)
        settings, model_config = config.of(PtxConfig), load_config(config.policy.model)
        positions, longest = getattr(model_config, "max_position_embeddings", None), settings.max_tokens
        refuse(
            positions is not None and longest > positions,
            f"ptx.max_tokens {longest} is more than the {positions} positions of policy.model: set it to {positions} or"
            " lower",
        )
        self._coef = settings.coef
        self._rows, self._fact = read_texts(settings, inputs.tokenizer)
        check_prompt_ids(self._rows, model_config)
        self._loader = PromptLoader(
            self._rows, settings.rows_per_step, rank(), world_size(), config.run.seed, section="ptx"
        )

    @property
    def facts(self) -> dict[str, str]:
        return {"ptx": self._fact}

    @property
    def rows(self) -> Mapping[str, Sequence[Any]]:
        return {"texts of ptx": self._rows}

    @property
    def state(self) -> PromptLoader[list[int]]:
        return self._loader

    def gradient(self, policy: Policy, beat: Callable[[], None]) -> Numbers:
        """Add the gradient of the next batch; returns the loss without the coefficient. `beat` is called before each
        micro-batch. Collective."""
        rows = [row for row, _ in self._loader.next_batch()]
        parts = list(policy.learn([row[:1] for row in rows], [row[1:] for row in rows], beat, self._coef))
        tokens = sum(count for _, count in parts)
        return {"ptx/loss": (sum(loss * count for loss, count in parts) / tokens, tokens)}


def read_texts(config: PtxConfig, tokenizer: Any) -> tuple[list[list[int]], str]:
    """Return rows of 2 to `max_tokens` tokens, and a line that describes the texts. First tokens are not predicted.

    A text ends with the end-of-sequence token if the tokenizer has one. Longer texts are split into consecutive rows.
    Raises UserError if a row has no text, or there is nothing to predict.
    """
    source = Source(config.path, config.split, config.subset, config.limit, "ptx.path", "ptx.split")
    rows = read_rows(source)
    require_column("ptx.column", config.column, rows, source)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces: list[list[int]] = []
    for number, row in enumerate(rows):
        text = row[config.column]
        where = f"ptx.column {config.column}: row {number} (from 0) of {source}"
        refuse(not isinstance(text, str), f"{where} has {text!r:.40}: give text")
        try:
            token_ids = text_ids(tokenizer, text, ended=True)
        except TypeError as error:
            # Tokenizers raise this for text that is not valid Unicode, with half of a surrogate pair.
            raise UserError(f"{where} cannot be tokenized: {error}") from error
        token_ids += [] if token_ids[-1:] == end else end
        starts = range(0, len(token_ids), config.max_tokens)
        pieces += (token_ids[start : start + config.max_tokens] for start in starts)
    # A single token at the end of a text has no context in its row.
    pieces = [piece for piece in pieces if len(piece) > 1]
    refuse(not pieces, f"ptx.path {source}: no text has two tokens, so there is nothing to predict: give others")
    tokens = sum(map(len, pieces))
    return pieces, f"{source}: {len(rows)} texts in {len(pieces)} rows of {tokens} tokens, weight {config.coef:g}"
