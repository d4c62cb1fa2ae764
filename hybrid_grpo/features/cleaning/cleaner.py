"""Checks the training rows for one kind of fault after another, and reports what was found."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.data.overlap import normalized, plain_text
from hybrid_grpo.data.prompts import prompt_text, read_prompt, require_column
from hybrid_grpo.data.sources import Row, Source, evaluation_source, read_rows, reader_of, source_rows, training_source
from hybrid_grpo.data.words import language, words
from hybrid_grpo.features.cleaning.duplicates import NearTexts, Sketches
from hybrid_grpo.features.cleaning.overlap import OverlapIndex
from hybrid_grpo.features.cleaning.settings import CleanConfig

_ANSWERS = ("answer", "tests", "target")
_STAND_INS = {"nan", "none", "null", "n/a", "na", "#n/a", "tbd", "todo", "unknown", "undefined", "?", "-", "...", "…"}
_OPEN_BOX = re.compile(r"\\boxed\s*(\{\s*\}|\s*$|\{[^{}]*$)")
_QUANTILES = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


@dataclass(frozen=True)
class Finding:
    """A row in which a fault was found."""

    row: int
    """Number of the row in the source, from 0."""
    why: str
    """The fault, in words that continue "row 3"."""
    text: str
    """The prompt; empty if there is none."""
    is_short: bool = False
    """Whether the prompt is like another but too short to be dropped for it."""


@dataclass(frozen=True)
class Report:
    """What was found in the rows of a source."""

    source: str
    rows: int
    kept: list[int]
    """Numbers of the rows that are kept, ascending."""
    found: dict[str, list[Finding]]
    """What each check found, keyed by its setting in `clean`, in the order of the checks."""
    lengths: dict[str, int]
    """Quantiles of the lengths of all readable prompts, in `unit`."""
    unit: str
    """`tokens`, or `words` without a tokenizer."""
    skipped: list[str]
    """Checks that were not possible, and why."""


@dataclass(frozen=True)
class _Readable:
    """A row that can be read."""

    number: int
    row: Row
    """The row as its task converts it."""
    text: str
    """The prompt without system messages."""
    length: int
    """Length of the prompt, in tokens or words."""


_Faults = Iterator[tuple[_Readable, str] | tuple[_Readable, str, bool]]
"""The faulty rows, what is wrong with each, and `Finding.is_short`."""


def clean(data: DataConfig, config: CleanConfig, tokenizer: Any = None) -> tuple[list[Row], Report]:
    """Return the training rows that are kept, unchanged, and a report on all rows.

    Args:
        tokenizer: counts the tokens of prompts; without one, lengths are in words and no prompt is too long.

    Raises:
        UserError: a source cannot be read, or no row of it can; a column is missing; or `overlap` is `refuse` and there
            is an overlap.
    """
    source = replace(training_source(data), any_letters=True)
    rows = source_rows(source)
    readable, unreadable = _read(rows, source, data, tokenizer)
    cleaner = _Cleaner(readable, data, config, counts_tokens=tokenizer is not None)
    found = {"unreadable": unreadable}
    dropped = {finding.row for finding in unreadable if config.unreadable == "drop"}
    for kind, check in cleaner.checks().items():
        action = getattr(config, kind)
        faults = check([row for row in readable if row.number not in dropped])
        found[kind] = [Finding(row.number, why, row.text, *short) for row, why, *short in faults]
        sure = [finding for finding in found[kind] if not finding.is_short]
        if action == "refuse" and sure:
            raise UserError(_refusal(sure, str(source)))
        if action == "drop":
            dropped |= {finding.row for finding in sure}
    kept = [number for number in range(len(rows)) if number not in dropped]
    lengths = np.array([row.length for row in readable])
    quantiles = {name: int(np.quantile(lengths, share, method="nearest")) for name, share in _QUANTILES.items()}
    unit = "words" if tokenizer is None else "tokens"
    report = Report(str(source), len(rows), kept, found, quantiles, unit, cleaner.skipped)
    return [rows[number] for number in kept], report


def _refusal(found: list[Finding], source: str) -> str:
    return (
        f"clean.overlap: {len(found)} rows of {source} are also held-out prompts, the first is row {found[0].row},"
        f" which {found[0].why}: set clean.overlap to drop, or remove them"
    )


def _read(rows: list[Row], source: Source, data: DataConfig, tokenizer: Any) -> tuple[list[_Readable], list[Finding]]:
    read = reader_of(source, data, rows)
    readable, unreadable = [], []
    for number, raw in enumerate(rows):
        text = ""
        try:
            row = read(number, raw)
            column, where = data.prompt_column, f"row {number} (from 0) of {source}"
            refuse(column not in row, f"data.prompt_column {column}: {where} has none: {did_you_mean(column, row)}")
            text = plain_text(prompt_text(row, where, data))
            refuse(not text.strip(), f"data.prompt_column {column}: {where} is an empty prompt")
            is_unicode = text.encode(errors="ignore").decode() == text
            counted = tokenizer is not None and is_unicode
            length = len(read_prompt(number, row, where, data, tokenizer).token_ids) if counted else len(words(text))
        except UserError as error:
            unreadable.append(Finding(number, f"cannot be read: {error}", text))
        else:
            readable.append(_Readable(number, row, text, length))
    if not readable:
        raise UserError(unreadable[0].why.removeprefix("cannot be read: "))
    return readable, unreadable


class _Cleaner:
    """Runs the checks. Each check receives the rows that are left, and yields the faulty ones."""

    def __init__(self, rows: list[_Readable], data: DataConfig, config: CleanConfig, *, counts_tokens: bool) -> None:
        self._rows, self._data, self._config = rows, data, config
        self.skipped: list[str] = []
        self._column = self._answer_column()
        self._held_out = self._held_out_texts() if config.overlap != "off" else []
        self._counts_tokens = counts_tokens

    def checks(self) -> dict[str, Callable[[list[_Readable]], _Faults]]:
        """Return the checks that are on and possible, keyed by their settings, in the order in which they run."""
        every = {
            "encoding": self._encoding, "answers": self._answers, "languages": self._languages,
            "lengths": self._lengths, "duplicates": self._duplicates, "near_duplicates": self._near_duplicates,
            "overlap": self._overlaps,
        }  # fmt: skip
        impossible = {
            "answers": "" if self._column else "answers: there is no column of answers: set clean.answer_column",
            "lengths": "" if self._counts_tokens else "lengths in tokens: set policy.model",
            "overlap": "" if self._held_out else "overlap: no held-out prompts: set data.eval_split or data.eval_path",
        }
        wanted = {kind: check for kind, check in every.items() if getattr(self._config, kind) != "off"}
        self.skipped = [impossible[kind] for kind in wanted if impossible.get(kind)]
        return {kind: check for kind, check in wanted.items() if not impossible.get(kind)}

    def _answer_column(self) -> str | None:
        column, known = self._config.answer_column, self._rows[0].row
        if column is not None and column not in known:
            raise UserError(f"clean.answer_column {column}: there is no such column: {did_you_mean(column, known)}")
        found = (name for name in (*_ANSWERS, self._data.completion_column) if name in known)
        return column or next(found, None)

    def _held_out_texts(self) -> list[str]:
        source = evaluation_source(self._data)
        if source is None:
            return []
        rows = read_rows(source, self._data)
        require_column("data.prompt_column", self._data.prompt_column, rows, source)
        return [
            plain_text(prompt_text(row, f"row {number} (from 0) of {source}", self._data))
            for number, row in enumerate(rows)
        ]

    def _encoding(self, rows: list[_Readable]) -> _Faults:
        for row in rows:
            answer = row.row.get(self._column) if self._column else None
            if why := encoding_fault(row.text):
                yield row, why
            elif isinstance(answer, str) and (why := encoding_fault(answer)):
                yield row, f"has an answer that {why}"

    def _answers(self, rows: list[_Readable]) -> _Faults:
        for row in rows:
            if why := answer_fault(row.row.get(self._column or "")):
                yield row, f"has an answer ({self._column}) that {why}"

    def _languages(self, rows: list[_Readable]) -> _Faults:
        for row in rows:
            if (code := language(row.text)) not in (None, *self._config.expected_languages):
                yield row, f"is in {code}"

    def _lengths(self, rows: list[_Readable]) -> _Faults:
        limit = self._data.max_prompt_tokens
        return ((row, f"is longer than data.max_prompt_tokens {limit}") for row in rows if row.length > limit)

    def _duplicates(self, rows: list[_Readable]) -> _Faults:
        column = self._column or ""
        first: dict[str, _Readable] = {}
        for row in rows:
            if (earlier := first.setdefault(normalized(row.text), row)) is not row:
                differs = row.row.get(column) != earlier.row.get(column)
                yield row, f"has the prompt of row {earlier.number}" + (", with another answer" if differs else "")

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """A number for each distinct normalized text among the rows and the held-out prompts."""
        texts = [*(row.text for row in self._rows), *self._held_out]
        return {text: number for number, text in enumerate(dict.fromkeys(map(normalized, texts)))}

    @cached_property
    def _sketches(self) -> Sketches:
        return Sketches(list(self._numbers))

    def _near_duplicates(self, rows: list[_Readable]) -> _Faults:
        near = NearTexts(self._sketches, self._config.similarity)
        seen: dict[int, _Readable] = {}
        for row in rows:
            number = self._numbers[normalized(row.text)]
            if number in seen:  # equal prompts are duplicates
                continue
            seen[number] = row
            nearest = near.nearest(number)
            if nearest is None:
                near.add(number)
            else:
                why = f"is like row {seen[nearest[0]].number} (similarity {nearest[1]:.2f})"
                yield row, why, near.is_short(number)

    def _overlaps(self, rows: list[_Readable]) -> _Faults:
        index = OverlapIndex(self._held_out, [row.text for row in rows], self._config.overlap_words)
        near: NearTexts | None = None
        first: dict[int, int] = {}
        if self._config.near_duplicates != "off":
            near = NearTexts(self._sketches, self._config.similarity)
            for number, text in enumerate(self._held_out):
                first.setdefault(self._numbers[normalized(text)], number)
            for number in first:
                near.add(number)
        for row in rows:
            if found := index.find(row.text):
                yield row, f"{found[1]} held-out row {found[0]}"
            elif near and (nearest := near.nearest(number := self._numbers[normalized(row.text)])):
                why = f"is like held-out row {first[nearest[0]]} (similarity {nearest[1]:.2f})"
                yield row, why, near.is_short(number)


def encoding_fault(text: str) -> str | None:
    """What is wrong with the characters in a text, as part of a message; None if nothing is wrong."""
    import ftfy

    if "\ufffd" in text:
        return "has U+FFFD, which stands for a letter that could not be decoded"
    for letter in set(text):
        kind = unicodedata.category(letter)
        if kind == "Cs":
            return f"has half of a surrogate pair, U+{ord(letter):04X}"
        if kind == "Cc" and letter not in "\t\n\r":
            return f"has the control character U+{ord(letter):04X}"
    if not text.isascii() and ftfy.is_bad(text):
        return f"was decoded with a wrong encoding: it is likely to have been {ftfy.fix_encoding(text)!r:.60}"
    return None


def answer_fault(answer: Any) -> str | None:
    """What is wrong with an answer, as part of a message; None if nothing is wrong. A value that is not text is
    only a fault if it is missing, empty or NaN."""
    if answer is None or answer != answer:
        return "is missing"
    if not isinstance(answer, str):
        return "is empty" if isinstance(answer, list | dict) and not answer else None
    text = normalized(answer)
    if not text:
        return "is empty"
    if text in _STAND_INS:
        return f"is {answer!r}, which stands for none"
    if "####" in text and not text.rpartition("####")[2].strip():
        return 'has nothing after its "####"'
    if _OPEN_BOX.search(text):
        return r"has nothing in its \boxed{}, or does not close it"
    return None
