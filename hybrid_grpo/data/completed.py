"""Rows that have completions already: what other programs, or people, wrote, to be scored.

A row has the prompt, and in the column of `data.completion_column` a completion, or in the column with an `s` behind
that name a list of them. A completion is text, or a chat that ends with the assistant's message. All other columns are
for the reward functions; those of a mapping `columns`, as `generate` and the rollouts of a run have it, stand beside
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError, did_you_mean
from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.data.prompts import prompt_text
from hybrid_grpo.data.sources import Row, Source, json_rows, read_rows


@dataclass(frozen=True)
class Completed:
    """One row."""

    prompt: Prompt
    """Without tokens; its id is the number of the row, from 0."""
    completions: list[Completion]
    """Without log-probabilities; as if each had ended by itself."""


def read_completed(path: str, config: DataConfig, stdin: Iterable[bytes], tokenizer: Any = None) -> list[Completed]:
    """The rows of a source as in `data.path`, or of standard input (`-`).

    Args:
        tokenizer: makes the tokens of completions; without one they have none.

    Raises:
        UserError: the source cannot be read, or a row has no prompt or no completion.
    """
    if path == "-":
        source, given = "standard input", [row for _, row in islice(json_rows(stdin, "standard input"), config.limit)]
        if not given:
            raise UserError("standard input is empty: write one JSON object a line")
        columns = list(dict.fromkeys(column for row in given for column in row))
        rows = [{column: row.get(column) for column in columns} for row in given]
    else:
        source = path
        # A file has no subsets: that of a recipe is of its own source.
        subset = None if Path(path).is_file() else config.subset
        rows = read_rows(Source(path, config.split, subset, config.limit, path_setting="FILE"))
    return [
        _completed(number, row, f"row {number} (from 0) of {source}", config, tokenizer)
        for number, row in enumerate(rows)
    ]


def _completed(number: int, row: Row, where: str, config: DataConfig, tokenizer: Any) -> Completed:
    if row.get(config.prompt_column) is None:
        raise UserError(
            f"data.prompt_column {config.prompt_column}: {where} has none there:"
            f" {did_you_mean(config.prompt_column, row)}"
        )
    one, many = config.completion_column, f"{config.completion_column}s"
    column = one if row.get(one) is not None else many
    if row.get(column) is None:
        raise UserError(f"data.completion_column {one}: {where} has neither {one} nor {many}: {did_you_mean(one, row)}")
    texts = _texts(row[column], f"{column}: {where}")
    others = {name: value for name, value in row.items() if name not in (config.prompt_column, one, many)}
    if isinstance(others.get("columns"), dict | None):
        others |= others.pop("columns", None) or {}
    system = {"role": "system", "content": config.system_prompt}
    given = row[config.prompt_column]
    # What `generate` and a run write has the recipe's system message already.
    added = isinstance(given, list) and given[:1] == [system]
    text = prompt_text(row, where, replace(config, system_prompt=None) if added else config)
    prompt = Prompt(number, text, [], others)
    return Completed(prompt, [Completion(_tokens(text, tokenizer), [], "stop", text) for text in texts])


def _texts(value: Any, where: str) -> list[str]:
    several = isinstance(value, list) and bool(value) and not isinstance(value[0], dict)
    texts = [_text(one) for one in value] if several else [_text(value)]
    for text, given in zip(texts, value if several else [value], strict=True):
        if text is None:
            raise UserError(f"{where} has {given!r:.40}: give text, or a chat that ends with the assistant's message")
    return [text for text in texts if text is not None]


def _text(value: Any) -> str | None:
    """Of a completion; None if it is none."""
    if isinstance(value, list) and value and isinstance(value[-1], dict) and value[-1].get("role") == "assistant":
        value = value[-1].get("content")
    return value if isinstance(value, str) else None


def _tokens(text: str, tokenizer: Any) -> list[int]:
    return [] if tokenizer is None else list(tokenizer(text, add_special_tokens=False)["input_ids"])
