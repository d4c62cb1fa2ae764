"""Reads metrics.jsonl into a table as the file is written, and samples it while a large file is being read; and reads
details.jsonl, the traces of a run's steps (`stages_of`), which are in the order of their steps."""

import os
import re
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hybrid_grpo.records.json_lines import Record, parse_step
from hybrid_grpo.records.trackers.growing_files import GrowingFile, last_lines, read_lines
from hybrid_grpo.watch.table import Table

_LAST_LINES = 100
"""Number of lines at the end of a file among which the last step is looked for."""
_GLIMPSE_OVER = 8 * 2**20
"""A file with more bytes than this is first sampled in evenly spaced places."""
_GLIMPSE_LINES = 400
_STEP = re.compile(rb'\{\s*"step":\s*(\d{1,9})\s*[,}]')
_LATER = 10**9
"""More than any step."""

Row = dict[str, float | None]


class MetricsFile:
    """Reads one metrics.jsonl step by step.

    When the file has been replaced (see `GrowingFile`), the table starts over. Lines that do not belong to a later step
    are counted in `damaged` and skipped.
    """

    def __init__(self, path: Path) -> None:
        self._lines = GrowingFile(path, self._take, self._begin)
        self._begin()

    def _begin(self) -> None:
        self.table = Table()
        self.damaged = 0
        self._glimpse: Table | None = None

    @property
    def share_read(self) -> float:
        """Share of the file that is in the table; 1 once no complete line is left to read."""
        return self._lines.share_read

    @property
    def shown(self) -> Table:
        """The table; while a large file is still being read, a sample of lines from all over it."""
        return self.table if self._glimpse is None else self._glimpse

    def read(self, seconds: float) -> bool:
        """Read what was appended, for about `seconds` at most; return whether `shown` has changed."""
        changed, before = self._lines.check(), self._lines.place
        if self._glimpse is None and before == 0 and self._lines.size > _GLIMPSE_OVER:
            self._glimpse = _glimpse(self._lines.path)
            changed = True
        self._lines.read(seconds)
        if self.share_read == 1 and self._glimpse is not None:
            self._glimpse, changed = None, True
        # What is shown does not change while it is the glimpse.
        return changed or (self._lines.place > before and self._glimpse is None)

    def _take(self, line: bytes) -> None:
        row = parse_step(line)
        self.damaged += row is None or not self.table.append(row)


def last_row(path: Path) -> Row | None:
    """Return the row of a file's last step, without reading the whole file; None if there is no step at its end."""
    return next(filter(None, map(parse_step, last_lines(path)[: -_LAST_LINES - 1 : -1])), None)


def _glimpse(path: Path) -> Table:
    """Return a table of lines from evenly spaced places in a file, including its first and its last line."""
    table: Table = Table()
    rows: list[Row | None] = []
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for number in range(_GLIMPSE_LINES):
            file.seek(int(size * number / _GLIMPSE_LINES))
            if number:
                file.readline()
            rows.append(parse_step(file.readline()))
        rows.append(last_row(path))
    for row in filter(None, rows):
        table.append(row)
    return table


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
