"""Reads JSON lines. `read_jsonl` refuses a damaged file; programs that watch a run skip malformed lines."""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_jsonl(path: Path) -> list[Record]:
    """Return the JSON objects in a run's file; none if there is no file. An incomplete last line is left out.

    Raises UserError, which names the file and the line, if a line is not a JSON object.
    """
    from hybrid_grpo.config.errors import UserError  # only here: the settings take long to load

    if not path.exists():
        return []
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line, parse_constant=lambda _: None) if line.endswith(b"\n") else {}
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path} line {number} is not JSON ({error}): the file is damaged") from None
            if not isinstance(row, dict):
                raise UserError(f"{path} line {number} is not a JSON object: the file is damaged")
            rows += [row] if line.endswith(b"\n") else []
    return rows


def parse(line: bytes) -> Record | None:
    """Return the JSON object in a line; None if the line is not an object. NaN and infinity become None, and integers
    that are too large for a browser become floats."""
    try:
        record = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def parse_step(line: bytes) -> Record | None:
    """Like `parse`, but also return None if the line does not belong to a step."""
    record = parse(line) if b'"step"' in line else None
    step = record.get("step") if record else None
    return record if type(step) is int and 0 <= step < 2**31 else None


_DECODER = json.JSONDecoder(parse_int=lambda n: int(n) if len(n) < 16 else float(n), parse_constant=lambda _: None)
