"""Searches a run's completions by text and reward, and reads what was recorded of their tokens. Files are read one at a
time, the newest first."""

import heapq
import math
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_grpo.records.files import as_json, json_safe
from hybrid_grpo.records.json_lines import Record, parse
from hybrid_grpo.records.trackers.growing_files import read_lines

SHOWN = 200
"""Maximum number of characters that the list shows of a text, such as a prompt."""
ORDERS = ("reward", "advantage", "length")
"""Numbers by which completions may be ordered; without one, the newest come first."""
_OF_GROUP = ("step", "prompt_id", "prompt", "sample", "completion", "messages", "length", "finish", "writer")
SAMPLED = ("logp", "advantage")
"""Numbers that a run records for each token with its rollouts."""


@dataclass(frozen=True)
class Query:
    """Conditions that completions must meet to be found. Bounds are inclusive; None means no bound."""

    text: str = ""
    """Text to find in the prompt, the completion or its messages, ignoring case."""
    finish: str = ""
    """Why the completion ended; empty means any reason."""
    least: float | None = None
    most: float | None = None
    """`least` and `most` bound the reward; a completion without a reward is within no bounds."""
    first: int | None = None
    last: int | None = None
    """`first` and `last` bound the step."""
    prompt: int | None = None
    """Row of the prompt in the data."""


@dataclass(frozen=True)
class Found:
    """Completions that were found, and the place where the search continues."""

    rows: list[dict[str, Any]]
    read: int
    """Number of completions that were examined."""
    next: tuple[int, int] | None
    """Step and offset at which the search continues; None if everything was searched."""


def search(
    files: Mapping[int, Path], query: Query, start: tuple[int, int] | None = None, limit: int = 200,
    seconds: float = 0.5, order: tuple[str, bool] | None = None,
) -> Found:  # fmt: skip
    """Search for completions that match, for about `seconds`, beginning at `start` (an earlier `Found.next`) or at the
    newest step. Return whole steps until there are `limit`, or whole groups of a step that has far more; with `order`,
    one of `ORDERS` and whether the lowest come first, the first `limit` of all that were examined in that order. Each
    has the `rewards` of its group, whether these completions match or not."""
    rows: list[dict[str, Any]] = []
    read, looked, deadline = 0, 0, time.monotonic() + seconds
    most = math.inf if order else 5 * limit
    for step in sorted(files, reverse=True):
        if (start and step > start[0]) or not _within(step, query.first, query.last):
            continue
        begin = start[1] if start and step == start[0] else 0
        if looked and (time.monotonic() > deadline or (not order and len(rows) >= limit)):
            return Found(_first(rows, limit, order), read, (step, begin))
        looked += 1
        group: Any = None
        rewards: list[float | None] = []
        for offset, line in _lines(files[step], begin):
            row = parse(line)
            before, group = group, row and _brief(row.get("group"))
            is_inside = group is not None and group == before
            if (len(rows) >= most and not is_inside) or (looked > 1 and time.monotonic() > deadline):
                return Found(_first(rows, limit, order), read, (step, offset))
            looked += 1
            read += row is not None
            if row is not None:
                # The list grows as the group's other completions are read.
                rewards = rewards if is_inside else []
                rewards.append(number(row.get("reward")))
                if _fits(row, query):
                    rows.append({**summarize(row, step, offset, query.text), "rewards": rewards})
        if order and len(rows) > 2 * limit:
            rows = _first(rows, limit, order)
    return Found(_first(rows, limit, order), read, None)


def _first(rows: list[dict[str, Any]], limit: int, order: tuple[str, bool] | None) -> list[dict[str, Any]]:
    """Return the first rows in an order; those without the number come last."""
    if not order or len(rows) <= limit:
        return rows
    by, is_rising = order
    with_number = [
        (value if is_rising else -value, at) for at, row in enumerate(rows) if (value := number(row[by])) is not None
    ]
    first = [rows[at] for _, at in heapq.nsmallest(limit, with_number)]
    return (first + [row for row in rows if number(row[by]) is None])[:limit]


def read_row(path: Path, offset: int) -> dict[str, Any] | None:
    """Return the completion at an offset in a file; None if no completion begins there."""
    at, line = next(_lines(path, offset), (-1, b""))
    return parse(line) if at == offset else None


def read_rewards(path: Path) -> dict[int, tuple[str, float | None]]:
    """Return the group and the reward of all completions of a step by their offsets."""
    rows = ((offset, parse(line)) for offset, line in _lines(path, 0))
    return {offset: (str(row.get("group")), number(row.get("reward"))) for offset, row in rows if row is not None}


def rivals(rewards: dict[int, tuple[str, float | None]]) -> dict[int, tuple[str, int]]:
    """Return, by the offset of each completion of a step, the kind and the offset of the completion with which it is
    compared: the `best` of its group or, for the best itself, the `worst`. Completions without a reward, and those in
    groups of equal rewards, are left out."""
    groups: dict[str, list[tuple[float, int]]] = {}
    for offset, (group, reward) in rewards.items():
        if reward is not None:
            groups.setdefault(group, []).append((reward, offset))
    found: dict[int, tuple[str, int]] = {}
    for members in groups.values():
        (high, best), (low, worst) = (end(members, key=lambda member: member[0]) for end in (max, min))
        if high > low:
            found |= {offset: ("best", best) for _, offset in members} | {best: ("worst", worst)}
    return found


def group_of(path: Path, offset: int) -> list[dict[str, Any]]:
    """Return the completions of the group of the completion at an offset in a file, in the order of the file, each
    with its `offset`; empty if no completion begins there."""
    groups = {at: group for at, (group, _) in read_rewards(path).items()}
    found: list[dict[str, Any]] = []
    for at in (at for at, group in groups.items() if offset in groups and group == groups[offset]):
        row = read_row(path, at)
        if row is None:
            continue
        shown = {name: row[name] for name in _OF_GROUP if name in row}
        found.append({"offset": at, **{name: number(row.get(name)) for name in ("reward", "advantage")}, **shown})
    return found


def line_number(path: Path, offset: int) -> int | None:
    """Return the number of lines that end before an offset in a file; None if the file cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(offset).count(b"\n")
    return None


def read_tokens(folder: Path, step: int, row: int, sample: int | None) -> Record | None:
    """Return what a run's folder has about the tokens of one completion; None if nothing in it matches.

    `row` is the completion's line in the rollouts of its step, counted from 0. `sample` is its number in its group, and
    must equal the recorded number. The result has `pieces` (the text of each sampled token), `ids`, `given` (texts that
    were not sampled, each with the number of tokens before it) and `measures`: lists as long as `pieces`, by name.
    """
    import pyarrow.parquet  # only here: it takes longer to load than the rest of the server

    path = folder / "rollouts" / f"step_{step:06d}.parquet"
    try:
        known = pyarrow.parquet.read_schema(path).names
        columns = [name for name in ("sample", "pieces", "token_ids", "given", *SAMPLED) if name in known]
        rows = pyarrow.parquet.read_table(path, columns=columns, filters=[("row", "=", row)]).to_pylist()
    except (OSError, pyarrow.lib.ArrowException):  # the file is missing, or not written completely
        return None
    found = rows[0] if rows else {}
    if found.get("sample", sample) != sample or found.get("pieces") is None:
        return None
    pieces = found["pieces"]
    measured = {name: found[name] for name in SAMPLED if found.get(name) is not None}
    return {
        "pieces": pieces, "ids": found.get("token_ids") or [], "given": found.get("given") or [],
        "measures": {name: json_safe(values) for name, values in measured.items() if len(values) == len(pieces)},
    }  # fmt: skip


def prompt_text(prompt: Any) -> str:
    """Return a prompt as text; for a conversation, the contents of its messages."""
    if isinstance(prompt, list):
        return "\n\n".join(_said(message.get("content")) for message in prompt if isinstance(message, dict))
    return str(prompt)


def _said(content: Any) -> str:
    """Return the content of a message as text; of its parts, those that are text, and the places of the others."""
    if not isinstance(content, list):
        return str(content)
    parts = (part for part in content if isinstance(part, dict))
    return " ".join(str(part["text"]) if "text" in part else f"[{part.get('type')}]" for part in parts)


def _lines(path: Path, begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield what `read_lines` yields for a file; nothing if there is no such file."""
    with suppress(OSError), path.open("rb") as file:
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
    """Return what the list shows of a completion; long texts are cut to the beginning, or to the part around `text`.
    `same` is a checksum, equal where completions are."""
    names = ("group", "sample", "prompt_id", "reward", "advantage", "length", "finish")
    numbers = {name: _brief(row.get(name)) for name in names}
    prompt, completion, messages = row.get("prompt"), str(row.get("completion", "")), row.get("messages")
    turns, checksum = 0, zlib.crc32(as_json([completion, messages]).encode(errors="replace"))
    if isinstance(messages, list) and len(messages) > 1:
        turns = len(messages)
        # What the list shows of a conversation is its end, or the part that was searched for.
        whole = prompt_text(messages)
        said = [message for message in messages if isinstance(message, dict) and message.get("content")]
        completion = whole if text and text.casefold() in whole.casefold() else prompt_text(said[-1:])
    return {
        "step": step, "offset": offset, **numbers, **({"turns": turns} if turns > 1 else {}), "same": checksum,
        "prompt": _around(_question(prompt, text), text), "completion": _around(completion, text),
    }  # fmt: skip


def _question(prompt: Any, text: str) -> str:
    """Return the user's last message; the whole prompt if it has none, or `text` elsewhere."""
    messages = prompt if isinstance(prompt, list) else []
    asked = [message for message in messages if isinstance(message, dict) and message.get("role") == "user"][-1:]
    question, whole = prompt_text(asked), prompt_text(prompt)
    is_elsewhere = text.casefold() in whole.casefold() and text.casefold() not in question.casefold()
    return whole if is_elsewhere or not asked else question


def _around(text: str, wanted: str) -> str:
    at = text.casefold().find(wanted.casefold()) if wanted else 0
    start = 0 if at < SHOWN // 2 else at - SHOWN // 4
    return ("… " if start else "") + text[start : start + SHOWN] + (" …" if start + SHOWN < len(text) else "")


def number(value: Any) -> float | None:
    """Return `value` if it is a finite number, else None."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def _brief(value: Any) -> str | float | None:
    return value[:SHOWN] if isinstance(value, str) else number(value)
