"""The rows to train on, looked at for one kind of fault after the other, and what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from hybrid_grpo.config import CleanConfig, DataConfig
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.data.cleaning.duplicates import NearTexts, Sketches, first_of_equals
from hybrid_grpo.data.cleaning.faults import answer_fault, encoding_fault, language
from hybrid_grpo.data.cleaning.overlap import HeldOut
from hybrid_grpo.data.cleaning.text import normalized, plain_text, words
from hybrid_grpo.data.prompts import prompt_text, read_prompt, require_column
from hybrid_grpo.data.sources import Row, evaluation_source, read_rows, source_rows, training_source
from hybrid_grpo.data.tasks import row_reader

_ANSWERS = ("answer", "tests", "target")
_QUANTILES = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}


@dataclass(frozen=True)
class Finding:
    """A row in which something was found."""

    row: int
    """Number of the row in the source, from 0."""
    why: str
    """What was found, in words that go on from "row 3"."""
    text: str
    """The prompt; empty where there is none."""


@dataclass(frozen=True)
class Report:
    """What was found in the rows of a source."""

    source: str
    rows: int
    kept: list[int]
    """Numbers of the rows that are kept, in their order."""
    found: dict[str, list[Finding]]
    """By the setting of `clean` that is about them, in the order in which they were looked for. A kind that is off, or
    for which there is nothing to look at, is not among them."""
    lengths: dict[str, int]
    """Quantiles of the lengths of all readable prompts, in `unit`."""
    unit: str
    """`tokens`, or `words` without a tokenizer."""
    not_looked: list[str]
    """What could not be looked for, and why."""


@dataclass(frozen=True)
class _Entry:
    """A row that can be read."""

    number: int
    row: Row
    """As its task has read it."""
    text: str
    """Of the prompt, without system messages."""
    length: int
    """Of the prompt, in tokens or words."""


def clean(data: DataConfig, config: CleanConfig, tokenizer: Any = None) -> tuple[list[Row], Report]:
    """The rows to train on that are kept, as they are in the source, and a report on all of them.

    Args:
        tokenizer: counts the tokens of prompts; without one, lengths are in words and none is too long.

    Raises:
        UserError: a source cannot be read, or none of its rows; a column is missing; `overlap` is `refuse` and there is
            one.
    """
    source = replace(training_source(data), any_letters=True)
    rows = source_rows(source)
    entries, unreadable = _entries(rows, str(source), data, tokenizer)
    cleaner = _Cleaner(entries, data, config, tokenizer)
    found = {"unreadable": unreadable}
    dropped = {finding.row for finding in unreadable if config.unreadable == "drop"}
    for kind, find in cleaner.kinds().items():
        action = getattr(config, kind)
        found[kind] = find([entry for entry in entries if entry.number not in dropped])
        if action == "refuse" and found[kind]:
            raise UserError(_refusal(found[kind], str(source)))
        if action == "drop":
            dropped |= {finding.row for finding in found[kind]}
    kept = [number for number in range(len(rows)) if number not in dropped]
    lengths = np.array([entry.length for entry in entries])
    quantiles = {name: int(np.quantile(lengths, share, method="nearest")) for name, share in _QUANTILES.items()}
    unit = "words" if tokenizer is None else "tokens"
    report = Report(str(source), len(rows), kept, found, quantiles, unit, cleaner.not_looked)
    return [rows[number] for number in kept], report


def _refusal(found: list[Finding], source: str) -> str:
    return (
        f"clean.overlap: {len(found)} rows of {source} are held-out prompts as well, the first is row {found[0].row},"
        f" which {found[0].why}: set clean.overlap to drop, or take them out"
    )


def _entries(rows: list[Row], source: str, data: DataConfig, tokenizer: Any) -> tuple[list[_Entry], list[Finding]]:
    """The rows that can be read, and those that cannot."""
    read = row_reader(data.task, source) if data.task is not None else lambda _, row: row
    entries, unreadable = [], []
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
            entries.append(_Entry(number, row, text, length))
    if not entries:
        raise UserError(unreadable[0].why.removeprefix("cannot be read: "))
    return entries, unreadable


class _Cleaner:
    """Looks for every kind of fault. Each is given the rows that are left, and finds some of them."""

    def __init__(self, entries: list[_Entry], data: DataConfig, config: CleanConfig, tokenizer: Any) -> None:
        self._entries, self._data, self._config = entries, data, config
        self.not_looked: list[str] = []
        self._column = self._answer_column()
        self._held_out = self._held_out_texts() if config.overlap != "off" else []
        self._counts_tokens = tokenizer is not None

    def kinds(self) -> dict[str, Callable[[list[_Entry]], list[Finding]]]:
        """The kinds that are looked for, by their settings, in their order."""
        every = {
            "encoding": self._encoding, "answers": self._answers, "languages": self._foreign,
            "lengths": self._over_long, "duplicates": self._equal, "near_duplicates": self._near,
            "overlap": self._overlaps,
        }  # fmt: skip
        cannot = {
            "answers": "" if self._column else "answers: there is no column of answers: set clean.answer_column",
            "lengths": "" if self._counts_tokens else "lengths in tokens: set policy.model",
            "overlap": "" if self._held_out else "overlap: no held-out prompts: set data.eval_split or data.eval_path",
        }
        wanted = {kind: find for kind, find in every.items() if getattr(self._config, kind) != "off"}
        self.not_looked = [cannot[kind] for kind in wanted if cannot.get(kind)]
        return {kind: find for kind, find in wanted.items() if not cannot.get(kind)}

    def _answer_column(self) -> str | None:
        column, known = self._config.answer_column, self._entries[0].row
        if column is not None and column not in known:
            raise UserError(f"clean.answer_column {column}: there is no such column: {did_you_mean(column, known)}")
        found = (name for name in (*_ANSWERS, self._data.completion_column) if name in known)
        return column or next(found, None)

    def _held_out_texts(self) -> list[str]:
        source = evaluation_source(self._data)
        if source is None:
            return []
        rows = read_rows(source)
        require_column("data.prompt_column", self._data.prompt_column, rows, source)
        where = (f"row {number} (from 0) of {source}" for number in range(len(rows)))
        return [plain_text(prompt_text(row, of_row, self._data)) for row, of_row in zip(rows, where, strict=True)]

    def _encoding(self, entries: list[_Entry]) -> list[Finding]:
        found = []
        for entry in entries:
            answer = entry.row.get(self._column) if self._column else None
            why = encoding_fault(entry.text)
            if why is None and isinstance(answer, str) and (in_answer := encoding_fault(answer)):
                why = f"has an answer that {in_answer}"
            found += [Finding(entry.number, why, entry.text)] if why else []
        return found

    def _answers(self, entries: list[_Entry]) -> list[Finding]:
        faults = ((entry, answer_fault(entry.row.get(self._column or ""))) for entry in entries)
        return [
            Finding(entry.number, f"has an answer ({self._column}) that {why}", entry.text)
            for entry, why in faults
            if why
        ]

    def _foreign(self, entries: list[_Entry]) -> list[Finding]:
        codes = ((entry, language(entry.text)) for entry in entries)
        expected = {None, *self._config.expected_languages}
        return [Finding(entry.number, f"is in {code}", entry.text) for entry, code in codes if code not in expected]

    def _over_long(self, entries: list[_Entry]) -> list[Finding]:
        limit = self._data.max_prompt_tokens
        why = f"is longer than data.max_prompt_tokens {limit}"
        return [Finding(entry.number, why, entry.text) for entry in entries if entry.length > limit]

    def _equal(self, entries: list[_Entry]) -> list[Finding]:
        found = []
        for entry, first in zip(entries, first_of_equals([normalized(entry.text) for entry in entries]), strict=True):
            if (earlier := entries[first]) is not entry:
                column = self._column or ""
                other = entry.row.get(column) != earlier.row.get(column)
                why = f"has the prompt of row {earlier.number}" + (", with another answer" if other else "")
                found.append(Finding(entry.number, why, entry.text))
        return found

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Numbers of the different texts, of the rows and of the held-out prompts, normalized."""
        texts = [*(entry.text for entry in self._entries), *self._held_out]
        return {text: number for number, text in enumerate(dict.fromkeys(map(normalized, texts)))}

    @cached_property
    def _sketches(self) -> Sketches:
        return Sketches(list(self._numbers))

    def _near(self, entries: list[_Entry]) -> list[Finding]:
        near = NearTexts(self._sketches, self._config.similarity)
        seen: dict[int, _Entry] = {}
        found = []
        for entry in entries:
            number = self._numbers[normalized(entry.text)]
            if number in seen:  # equal ones are another kind
                continue
            seen[number] = entry
            nearest = near.nearest(number)
            if nearest is None:
                near.add(number)
            else:
                why = f"is like row {seen[nearest[0]].number} (similarity {nearest[1]:.2f})"
                found.append(Finding(entry.number, why, entry.text))
        return found

    def _overlaps(self, entries: list[_Entry]) -> list[Finding]:
        texts = [entry.text for entry in entries]
        held_out = HeldOut(self._held_out, texts, self._config.overlap_words)
        near: NearTexts | None = None
        first: dict[int, int] = {}
        if self._config.near_duplicates != "off":
            near = NearTexts(self._sketches, self._config.similarity)
            for number, text in enumerate(self._held_out):
                first.setdefault(self._numbers[normalized(text)], number)
            for number in first:
                near.add(number)
        found = []
        for entry in entries:
            inside = held_out.inside(entry.text)
            nearest = near.nearest(self._numbers[normalized(entry.text)]) if near and not inside else None
            if inside is not None:
                found.append(Finding(entry.number, f"{inside[1]} held-out row {inside[0]}", entry.text))
            elif nearest is not None:
                why = f"is like held-out row {first[nearest[0]]} (similarity {nearest[1]:.2f})"
                found.append(Finding(entry.number, why, entry.text))
        return found
