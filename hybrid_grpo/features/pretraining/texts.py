"""Reads texts for next-token prediction, tokenizes them, and splits them into rows of bounded length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.prompts import require_column
from hybrid_grpo.data.sources import Source, read_rows
from hybrid_grpo.features.pretraining.settings import PtxConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_texts(config: PtxConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[list[list[int]], str]:
    """Rows of 2 to `max_tokens` tokens, the first of which is not predicted, and a line that says what was read.

    A text ends with end-of-sequence if the tokenizer has that token; longer ones are split into consecutive rows.
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
        refuse(not isinstance(text, str), f"{where} has {type(text).__name__} {str(text)[:40]!r}: give text")
        try:
            token_ids = [*tokenizer(text)["input_ids"], *end]
        except TypeError as error:
            # Tokenizers raise this for text that is not Unicode: one with half of a surrogate pair.
            raise UserError(f"{where} cannot be tokenized: {error}") from error
        starts = range(0, len(token_ids), config.max_tokens)
        pieces += (token_ids[start : start + config.max_tokens] for start in starts)
    # A single token at the end of a text has no context in its row.
    pieces = [piece for piece in pieces if len(piece) > 1]
    refuse(not pieces, f"ptx.path {source}: no text has two tokens, so there is nothing to predict: give others")
    tokens = sum(map(len, pieces))
    return pieces, f"{source}: {len(rows)} texts in {len(pieces)} rows of {tokens} tokens, weight {config.coef:g}"
