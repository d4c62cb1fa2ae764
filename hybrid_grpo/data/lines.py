"""Prompts from standard input, one a line: piped in whole, or typed one after another.

A line is a text prompt, or, if it begins with `{`, a JSON object with the columns of a row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.prompts import DataReport, prompts_of
from hybrid_grpo.data.sources import Row, Source, same_columns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_lines(
    lines: Iterable[bytes], config: DataConfig, tokenizer: PreTrainedTokenizerBase, first: int = 0
) -> tuple[list[Prompt], DataReport]:
    """The prompts of all lines that are not blank, numbered from `first`, with their report.

    Raises:
        UserError: there are no prompts, a line cannot be read, or see `read_prompts`.
    """
    source = Source("standard input", split=None, limit=config.limit)
    filled = ((number, line) for number, line in enumerate(lines, start=first + 1) if line.strip())
    rows = same_columns([_row(number, line, config) for number, line in islice(filled, source.limit)])
    refuse(not rows, "data.path is standard input, and that is empty: write one prompt a line")
    kept = prompts_of(rows, source, config, tokenizer)
    return [replace(prompt, id=first + prompt.id) for prompt in kept], DataReport.of(source, rows, kept)


def typed(stdin: BinaryIO, read: Callable[[bytes, int], Prompt]) -> Iterator[Prompt]:
    """Ask for one prompt after another until the input ends. A mistake is printed, and the next prompt is asked for.

    Args:
        read: makes a prompt from a line and its number, or raises a `UserError`.
    """
    number = 0
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = stdin.readline()
        if not line:
            print(file=sys.stderr)
            return
        if not line.strip():
            continue
        try:
            prompt = read(line, number)
        except UserError as error:
            print(error, file=sys.stderr)
            continue
        yield prompt
        number += 1


def _row(number: int, line: bytes, config: DataConfig) -> Row:
    where = f"data.path: line {number} of standard input"
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 ({error.reason}): convert it") from error
    if not text.startswith("{"):
        return {config.prompt_column: text}
    try:
        row: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"{where} begins like a JSON object and is not one ({error}):"
            f' write text as {{"{config.prompt_column}": ...}}'
        ) from error
    return row
