"""metrics.jsonl as it is written: its numbers in a table, and a glimpse of them while a large file is read."""

import os
from pathlib import Path

from hybrid_grpo.records.json_lines import GrowingFile, last_lines, open_file, parse_step
from hybrid_grpo.watch.table import Table

_LAST_LINES = 100
"""Lines at the end of a file among which its last step is looked for."""
_GLIMPSE_OVER = 8 * 2**20
"""Files with more unread bytes are looked at in places first."""
_GLIMPSE_LINES = 400
_GLIMPSE_LINE = 2**17
"""Bytes of a line that is looked at first."""

Row = dict[str, float | None]


class MetricsFile:
    """Reads one metrics.jsonl step by step.

    Where the file is another one than before (see `GrowingFile`) the table starts over. Lines that are no step are
    counted in `damaged` and passed over.
    """

    def __init__(self, path: Path) -> None:
        self._lines = GrowingFile(path, self._take, self._begin)
        self._begin()

    def _begin(self) -> None:
        self.table = Table()
        self.damaged = 0
        self._last = -1.0
        self._glimpse: Table | None = None

    @property
    def share_read(self) -> float:
        """Share of the file that is in the table; 1 where no whole line is left."""
        return self._lines.share_read

    @property
    def shown(self) -> Table:
        """The table, or lines from all over the file while most of it is unread."""
        return self.table if self._glimpse is None else self._glimpse

    def read(self, seconds: float) -> bool:
        """Read what has been appended, for about so many seconds at most; whether `shown` has changed."""
        changed, before = self._lines.check(), self._lines.place
        if self._glimpse is None and before == 0 and self._lines.size > _GLIMPSE_OVER:
            self._glimpse = _glimpse(self._lines.path)
            changed = True
        self._lines.read(seconds)
        if self.share_read == 1 and self._glimpse is not None:
            self._glimpse, changed = None, True
        # What is shown does not change while a glimpse stands for the file.
        return changed or (self._lines.place > before and self._glimpse is None)

    def _take(self, line: bytes) -> None:
        row = parse_step(line)
        if row is None or not self._append(row):
            self.damaged += 1

    def _append(self, row: Row) -> bool:
        step = row["step"]
        assert step is not None
        if step <= self._last:
            return False
        try:
            self.table.append(row)
        except (TypeError, ValueError, OverflowError):
            return False
        self._last = step
        return True


def last_row(path: Path) -> Row | None:
    """The last whole line of a file, without reading the rest; None where there is none."""
    return next(filter(None, map(parse_step, last_lines(path)[: -_LAST_LINES - 1 : -1])), None)


def _glimpse(path: Path) -> Table:
    """Lines from evenly spaced places of a file, with its first and its last."""
    table, last = Table(), -1.0
    try:
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            for number in range(_GLIMPSE_LINES):
                file.seek(int(size * number / _GLIMPSE_LINES))
                if number:
                    file.readline(_GLIMPSE_LINE)
                last = _append_later(table, file.readline(_GLIMPSE_LINE), last)
    except OSError:
        return table
    _append_later(table, b"".join(last_lines(path)[-1:]), last)
    return table


def _append_later(table: Table, line: bytes, last: float) -> float:
    """Append a line where it is a step after `last`; the last step of the table."""
    row = parse_step(line)
    step = None if row is None else row["step"]
    if row is None or step is None or step <= last:
        return last
    try:
        table.append(row)
    except (TypeError, ValueError, OverflowError):
        return last
    return step
