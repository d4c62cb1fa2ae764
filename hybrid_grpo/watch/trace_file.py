"""Reads details.jsonl, the traces of a run's steps (`records/step_trace.py`), which are in the order of their steps."""

import os
import re
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hybrid_grpo.records.json_lines import Record, parse_step, read_lines

_STEP = re.compile(rb'\{\s*"step":\s*(\d{1,9})\s*[,}]')
_LATER = 10**9
"""More than any step."""


def read_step(path: Path, step: int | None) -> Record | None:
    """Return the trace of the newest step, or of the newest that is not after `step`; None if there is none."""
    wanted = _LATER - 1 if step is None else step
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        # From this byte on, the next step is a later one.
        later = bisect_right(range(size), wanted, key=lambda begin: _next_step(file, begin)[0])
        return parse_step(_next_step(file, later - 1)[1]) if later else None
    return None


def first_step(path: Path) -> int | None:
    """Return the first step of a file; None if it has no steps or cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        number, line = _next_step(file, 0)
        return number if line else None
    return None


def _next_step(file: BinaryIO, begin: int) -> tuple[int, bytes]:
    """Return the number and the line of the first step whose line is complete and begins at the byte `begin` or after
    it; if there is none, `_LATER`."""
    for _, line in read_lines(file, begin):
        if line.endswith(b"\n") and (found := _STEP.match(line)):
            return int(found[1]), line
    return _LATER, b""
