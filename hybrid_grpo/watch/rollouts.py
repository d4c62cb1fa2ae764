"""Completions of a run, found by what they say and what they were given. Files are read one at a time, newest first."""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_grpo.records.json_lines import open_file, parse, read_lines

_STEP_BYTES, _STEP_LINES = 2**26, 2**17
"""Of a step's file, in which completions are compared."""
SHOWN = 200
"""Characters of a text in the list."""
_LETTERS = 200
"""Of a text in the place of a number."""


@dataclass(frozen=True)
class Query:
    """Which completions are looked for. Bounds are inclusive; None is no bound."""

    text: str = ""
    """Part of the prompt, the completion or what tools said in it, in upper or lower case."""
    finish: str = ""
    """Why the completion ended; empty: for any reason."""
    least: float | None = None
    most: float | None = None
    """Bounds of the reward. A completion without a reward is in none."""
    first: int | None = None
    last: int | None = None
    """Bounds of the step."""
    prompt: int | None = None
    """Row of the prompt in the data."""


@dataclass(frozen=True)
class Found:
    """Completions that were found, and where to look on."""

    rows: list[dict[str, Any]]
    read: int
    """How many completions were looked at."""
    next: tuple[int, int] | None
    """Step and byte at which the search goes on; None: everything has been searched."""
    left_out: int = 0
    """How many lines were too long to be read."""


def search(
    files: dict[int, Path], query: Query, start: tuple[int, int] | None = None, limit: int = 200, seconds: float = 0.5
) -> Found:
    """The newest completions that fit, at most `limit` and about `seconds` long; from `start`, as `Found.next` has it,
    or the newest step."""
    rows: list[dict[str, Any]] = []
    read, left_out, looked, deadline = 0, 0, 0, time.monotonic() + seconds
    for step in sorted(files, reverse=True):
        if (start and step > start[0]) or not _within(step, query.first, query.last):
            continue
        begin = start[1] if start and step == start[0] else 0
        if looked and time.monotonic() > deadline:
            return Found(rows, read, (step, begin), left_out)
        looked += 1
        for offset, line in _lines(files[step], begin):
            if len(rows) >= limit or (looked > 1 and time.monotonic() > deadline):
                return Found(rows, read, (step, offset), left_out)
            looked += 1
            left_out += line is None
            row = parse(line) if line else None
            read += row is not None
            if row is not None and _fits(row, query):
                rows.append(summarize(row, step, offset, query.text))
    return Found(rows, read, None, left_out)


def read_row(path: Path, offset: int) -> dict[str, Any] | None:
    """The completion that begins at a byte of a file; None where none does."""
    _, line = next(_lines(path, offset), (0, None))
    return parse(line) if line else None


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """All completions of a step, each with the byte at which it begins; of a far too large file the first ones."""
    begun = itertools.takewhile(lambda found: found[0] < _STEP_BYTES, itertools.islice(_lines(path, 0), _STEP_LINES))
    return [(offset, row) for offset, line in begun if line and (row := parse(line)) is not None]


def rivals(rows: list[tuple[int, dict[str, Any]]]) -> dict[int, tuple[str, int]]:
    """What each completion of a step is compared with, by the bytes at which they begin: the best of its group, or the
    worst where it is the best itself. Completions without a reward, and groups of one reward, have none."""
    groups: dict[str, list[tuple[float, int]]] = {}
    for offset, row in rows:
        if number(row.get("reward")) is not None:
            groups.setdefault(str(row.get("group")), []).append((row["reward"], offset))
    found: dict[int, tuple[str, int]] = {}
    for members in groups.values():
        (high, best), (low, worst) = (end(members, key=lambda member: member[0]) for end in (max, min))
        if high > low:
            found |= {offset: ("best", best) for _, offset in members} | {best: ("worst", worst)}
    return found


def line_number(path: Path, offset: int) -> int:
    """How many lines of a file end before a byte of it."""
    count = 0
    with open_file(path) as file:
        while offset > 0 and (chunk := file.read(min(offset, 2**20))):
            count += chunk.count(b"\n")
            offset -= len(chunk)
    return count


def prompt_text(prompt: Any) -> str:
    """A prompt as text; of a conversation, what was said."""
    if isinstance(prompt, list):
        return "\n\n".join(str(message.get("content")) for message in prompt if isinstance(message, dict))
    return str(prompt)


def _lines(path: Path, begin: int) -> Iterator[tuple[int, bytes | None]]:
    """`read_lines` of a file; none where there is no such file."""
    try:
        file = open_file(path)
    except OSError:  # the run has cut it
        return
    with file:
        yield from read_lines(file, begin)


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)


def _fits(row: dict[str, Any], query: Query) -> bool:
    if query.finish and row.get("finish") != query.finish:
        return False
    if not _within(number(row.get("reward")), query.least, query.most):
        return False
    if query.prompt is not None and row.get("prompt_id") != query.prompt:
        return False
    wanted = query.text.casefold()
    texts = (prompt_text(row.get("prompt")), str(row.get("completion", "")), prompt_text(row.get("messages") or ""))
    return any(wanted in text.casefold() for text in texts)


def summarize(row: dict[str, Any], step: int, offset: int, text: str = "") -> dict[str, Any]:
    """What the list says of a completion; of long texts the beginning, or what stands around `text`."""
    numbers = {name: _brief(row.get(name)) for name in ("group", "sample", "reward", "advantage", "length", "finish")}
    prompt, completion = prompt_text(row.get("prompt")), str(row.get("completion", ""))
    return {
        "step": step,
        "offset": offset,
        **numbers,
        "prompt": _around(prompt, text),
        "completion": _around(completion, text),
    }


def _around(text: str, wanted: str) -> str:
    """The beginning of a text, or what stands around the words that were looked for."""
    at = text.casefold().find(wanted.casefold()) if wanted else 0
    start = 0 if at < SHOWN // 2 else at - SHOWN // 4
    return ("… " if start else "") + text[start : start + SHOWN] + (" …" if start + SHOWN < len(text) else "")


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _brief(value: Any) -> str | float | None:
    return value[:_LETTERS] if isinstance(value, str) else number(value)
