"""Reads details.jsonl, the traces of a run's steps (`records/step_trace.py`).

A step is found by bisection, since the lines are in the order of their steps.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hybrid_grpo.records.json_lines import Record, parse_step, read_lines

_STEP = re.compile(rb'\{\s*"step":\s*(\d{1,9})\s*[,}]')
_NEAR = 2**18
"""A range of at most this many bytes is read line by line rather than bisected."""
_END = 2**20
_SECONDS = 0.3
"""The search for a step gives up after this time; usually it takes milliseconds."""


def read_step(path: Path, step: int | None) -> Record | None:
    """Return the trace of the newest step, or of the newest that is not after `step`; None if there is none."""
    deadline, found = time.monotonic() + _SECONDS, b""
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - _END) if step is None else _before(file, size, step, deadline)
        for _, number, line in _steps(file, begin, deadline):
            if step is not None and number > step:
                break
            found = line
    return parse_step(found)


def _before(file: BinaryIO, size: int, step: int, deadline: float) -> int:
    """Return the offset of a line from which the step is at most about `_NEAR` bytes away."""
    low, high = 0, size
    while high - low > _NEAR:
        middle = (low + high) // 2
        place, number, _ = next(_steps(file, middle, deadline), (high, 0, b""))
        if place >= high or number > step:
            high = middle
        else:
            low = place
    return low


def first_step(path: Path) -> int | None:
    """Return the first step of a file; None if it has no steps or cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        return next((number for _, number, _ in _steps(file, 0, time.monotonic() + _SECONDS)), None)
    return None


def _steps(file: BinaryIO, begin: int, deadline: float) -> Iterator[tuple[int, int, bytes]]:
    """Yield the complete lines of steps from the byte `begin` on: where each begins, its step, and the line."""
    for offset, line in read_lines(file, begin):
        if time.monotonic() > deadline:
            return
        match = _STEP.match(line) if line.endswith(b"\n") else None
        if match:
            yield offset, int(match[1]), line
