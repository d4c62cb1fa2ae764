"""metrics.jsonl as it is written: what is new is read, by its place in the file, and nothing twice."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hybrid_grpo.watch.table import Table

_CHUNK = 2**20
_MARK = 512
"""Bytes before the place that has been read to. Where they have changed, the file is another one."""
_GLIMPSE_OVER = 8 * 2**20
"""Files with more unread bytes are looked at in places first."""
_GLIMPSE_LINES = 400
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)

Row = dict[str, float | None]


class MetricsFile:
    """Reads one metrics.jsonl step by step.

    A resumed run cuts the file and writes it on, and a folder may be replaced by another: the table starts over then,
    and `on_restart` is called. `on_row` is called with every row that was read. A last line without its end is left
    until it is whole. Lines that are no step are counted in `damaged` and passed over.
    """

    def __init__(
        self,
        path: Path,
        on_row: Callable[[Row], None] = lambda row: None,
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._on_row, self._on_restart = on_row, on_restart
        self._begin()

    def _begin(self) -> None:
        self.table = Table()
        self.damaged = 0
        self._size = 0
        """Bytes of the file when it was last looked at."""
        self._read = 0
        self._caught_up = True
        self._mark = b""
        self._last = -1.0
        self._glimpse: Table | None = None

    @property
    def share_read(self) -> float:
        """Share of the file that is in the table; 1 where no whole line is left."""
        return 1.0 if self._caught_up else min(0.999, self._read / self._size)

    @property
    def shown(self) -> Table:
        """The table, or lines from all over the file while most of it is unread."""
        return self.table if self._glimpse is None else self._glimpse

    def read(self, seconds: float) -> bool:
        """Read what has been appended, for about so many seconds at most; whether `shown` has changed."""
        try:
            with self._path.open("rb") as file:
                return self._read_on(file, time.monotonic() + seconds)
        except OSError:  # there is none (any more)
            restarted = self._size > 0
            if restarted:
                self._restart()
            return restarted

    def _read_on(self, file: BinaryIO, deadline: float) -> bool:
        size = os.fstat(file.fileno()).st_size
        file.seek(self._read - len(self._mark))
        changed = size < self._read or file.read(len(self._mark)) != self._mark
        if changed:
            self._restart()
        self._size = size
        if self._glimpse is None and self._read == 0 and size > _GLIMPSE_OVER:
            self._glimpse = _glimpse(file, size)
            changed = True
        before = self._read
        while not (caught_up := not self._read_chunk(file)) and time.monotonic() < deadline:
            pass
        self._caught_up = caught_up
        if caught_up and self._glimpse is not None:
            self._glimpse, changed = None, True
        # What is shown does not change while a glimpse stands for the file.
        return changed or (self._read > before and self._glimpse is None)

    def _read_chunk(self, file: BinaryIO) -> bool:
        """Read some whole lines; False where there are none."""
        file.seek(self._read)
        chunk = file.read(_CHUNK)
        end = chunk.rfind(b"\n") + 1
        while chunk and not end:  # a line longer than a chunk
            more = file.read(_CHUNK)
            if not more:
                return False
            chunk += more
            end = chunk.rfind(b"\n") + 1
        for line in chunk[:end].splitlines():
            row = _row(line)
            if row is None or not self._take(row):
                self.damaged += 1
        self._read += end
        self._mark = (self._mark + chunk[:end])[-_MARK:]
        self._size = max(self._size, self._read)
        return end > 0

    def _take(self, row: Row) -> bool:
        step = row["step"]
        assert step is not None
        if step <= self._last:
            return False
        try:
            self.table.append(row)
        except (TypeError, ValueError, OverflowError):
            return False
        self._last = step
        self._on_row(row)
        return True

    def _restart(self) -> None:
        self._begin()
        self._on_restart()


def last_row(path: Path) -> Row | None:
    """The last whole line of a file, without reading the rest; None where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _CHUNK))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    return next(filter(None, map(_row, reversed(lines))), None)


def _glimpse(file: BinaryIO, size: int) -> Table:
    """Lines from evenly spaced places of a file, with its first and its last."""
    table, last = Table(), -1.0
    for number in range(_GLIMPSE_LINES):
        file.seek(int(size * number / _GLIMPSE_LINES))
        if number:
            file.readline()
        last = _append_later(table, file.readline(), last)
    file.seek(max(0, size - _CHUNK))
    lines = file.read().split(b"\n")[:-1]
    _append_later(table, lines[-1] if lines else b"", last)
    return table


def _append_later(table: Table, line: bytes, last: float) -> float:
    """Append a line where it is a step after `last`; the last step of the table."""
    row = _row(line)
    step = None if row is None else row["step"]
    if row is None or step is None or step <= last:
        return last
    try:
        table.append(row)
    except (TypeError, ValueError, OverflowError):
        return last
    return step


def _row(line: bytes) -> dict[str, Any] | None:
    """The numbers of a line; None where it is none of metrics.jsonl."""
    try:
        row = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
