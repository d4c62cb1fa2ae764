"""Stores a step's completions as tokens in rollouts/step_*.parquet, next to the .jsonl file with texts and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import parquet

from hybrid_grpo.data.episodes import PLACE
from hybrid_grpo.model.sidecars import find
from hybrid_grpo.model.support import SamplingMask
from hybrid_grpo.model.visual_tokens import keys_of
from hybrid_grpo.records.files import replace_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid_grpo.data.batch import Rollout

_IDS, _NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32())
_READ = pa.list_(pa.int64())
"""Tokens of which those of pictures are below 0; see `model/visual_tokens.py`."""
_GIVEN = pa.list_(pa.struct([("before", pa.int32()), ("ids", _READ), ("text", pa.string())]))
SCHEMA = pa.schema(
    [
        *(("row", pa.int32()), ("prompt_index", pa.int32()), ("sample", pa.int32())),
        *(("prompt_id", pa.int64()), ("epoch", pa.int64()), ("writer", pa.string())),
        *(("prompt_ids", _READ), ("token_ids", _IDS), ("pieces", pa.list_(pa.string()))),
        *(("logp", _NUMBERS), ("advantage", _NUMBERS), ("given", _GIVEN), ("finish", pa.string())),
    ]
)
"""Schema of the parquet file; docs/rollouts.md explains the columns."""
_LONGEST = 4
"""Maximum number of tokens that make up a single character: one for each of its bytes in UTF-8."""


class TokenText:
    """Decodes tokens one by one, so that their texts, when joined, are the text of the whole sequence."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Decoded before each token, since tokenizers drop the space before the first one.
        self._before: list[int] = list(tokenizer("a", add_special_tokens=False)["input_ids"][:1])
        self._begin = self._decode(self._before)
        self._known: dict[int, str] = {}
        """The texts of tokens that consist of whole characters."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, special or not. The last of the tokens that form a character has its text."""
        texts: list[str] = [self._known[token] for token in ids if token in self._known]
        if len(texts) == len(ids):
            return texts
        texts = []
        held: list[int] = []
        for token in ids:
            held.append(token)
            text = self._known.get(token) if len(held) == 1 else None
            text = self._of(held) if text is None else text
            is_part = text.endswith("\ufffd") and len(held) < _LONGEST
            if len(held) == 1 and not is_part:
                self._known[token] = text
            texts.append("" if is_part else text)
            held = held if is_part else []
        if held:
            texts[-1] = self._of(held)
        return texts

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including special tokens, with a `PLACE` for each picture."""
        runs = ((seen, list(run)) for seen, run in groupby(ids, lambda token: token < 0))
        return "".join(PLACE * len(keys_of(run)) if seen else "".join(self.pieces(run)) for seen, run in runs)

    def _of(self, ids: list[int]) -> str:
        text = self._decode([*self._before, *ids])
        return text[len(self._begin) :] if text.startswith(self._begin) else self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_table(rollout: Rollout, first_group: int, advantages_BT: Tensor | None, text: TokenText) -> pa.Table:
    """Return the completions of this rank as a table, with rows numbered within the rank. `first_group` is the number
    of its first group across all ranks; `advantages_BT` is None if there are no advantages yet."""
    size, rows = rollout.num_generations, list(zip(rollout.row_prompts, rollout.completions, strict=True))
    advantages = [None] * len(rows) if advantages_BT is None else advantages_BT.tolist()
    columns = {
        "row": range(len(rows)), "prompt_index": [first_group + row // size for row in range(len(rows))],
        "sample": [row % size for row in range(len(rows))], "prompt_id": [prompt.id for prompt, _ in rows],
        "epoch": [prompt.epoch for prompt, _ in rows], "writer": [completion.writer or None for _, completion in rows],
        "prompt_ids": [prompt.token_ids for prompt, _ in rows],
        "token_ids": [completion.token_ids for _, completion in rows],
        "pieces": [text.pieces(completion.token_ids) for _, completion in rows],
        "logp": [completion.logp for _, completion in rows],
        "advantage": [
            value_T and value_T[: len(c.token_ids)] for value_T, (_, c) in zip(advantages, rows, strict=True)
        ],
        "given": [[{"before": n, "ids": ids, "text": text.text(ids)} for n, ids in c.observations] for _, c in rows],
        "finish": [completion.finish for _, completion in rows],
    }  # fmt: skip
    table = pa.table({name: pa.array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names})
    masks = (find(completion.sidecars, SamplingMask) for completion in rollout.completions)
    supports = [mask and mask.lists() for mask in masks]
    carried = [list(completion.carried) for _, completion in rows]
    # Further columns, if the sampler recorded supports, or if tokens were sampled in earlier steps.
    for name, values, kind in (("support", supports, pa.list_(_IDS)), ("carried", carried, _IDS)):
        if any(values):
            table = table.append_column(name, pa.array(values, kind))
    return table


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Join the tables of all ranks in rank order, and number the rows across all ranks."""
    table = pa.concat_tables(tables, promote_options="default")
    return table.set_column(0, SCHEMA.field("row"), pa.array(range(len(table)), pa.int32()))


def write_table(path: Path, table: pa.Table) -> None:
    """Replace a parquet file atomically."""
    out = pa.BufferOutputStream()
    parquet.write_table(table, out, compression="zstd")
    replace_bytes(path, out.getvalue())
