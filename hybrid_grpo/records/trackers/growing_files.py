"""Reads files of JSON lines while a run writes them."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_END, _MOST_LAST_LINES = 2**20, 10_000
_CHUNK = 2**18
_MARK = 512
"""Number of bytes to remember from the end of what was read. If they have changed, the file was replaced."""


def read_lines(file: BinaryIO, begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and content of each line that begins at the byte `begin` or after it."""
    file.seek(max(0, begin - 1))
    offset = begin + len(file.readline()) - 1 if begin > 0 else 0
    for line in file:
        yield offset, line
        offset += len(line)


def last_lines(path: Path) -> list[bytes]:
    """Return the last lines of a file, up to a MiB and `_MOST_LAST_LINES`; none if it cannot be read. The first may be
    only part of a line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
            return file.read(_END).split(b"\n")[:-1][-_MOST_LAST_LINES:]
    except OSError:
        return []


class GrowingFile:
    """Reads a file line by line as it is written, each line once.

    If the file is truncated by a resumed run, or replaced by another, `on_restart` is called, and the file is read
    again from the first line. An incomplete last line is not read until it is complete.
    """

    def __init__(self, path: Path, on_line: Callable[[bytes], None], on_restart: Callable[[], None]) -> None:
        self.path = path
        self._on_line, self._on_restart = on_line, on_restart
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        """Size of the file in bytes, as last seen."""
        self.place = 0
        """Number of bytes read so far."""
        self._caught_up = True
        self._mark = b""

    @property
    def share_read(self) -> float:
        """Share of the file that has been read; 1 once no complete line is left to read."""
        return 1.0 if self._caught_up else min(0.999, self.place / self.size)

    def check(self) -> bool:
        """Return whether the file has been replaced or removed; if so, it will be read again from the beginning."""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(self.place - len(self._mark))
                changed = size < self.place or file.read(len(self._mark)) != self._mark
        except OSError:  # there is no such file (anymore)
            size, changed = 0, self.size > 0
        if changed:
            self._begin()
            self._on_restart()
        self.size = size
        return changed

    def read(self, seconds: float) -> None:
        """Read the lines that were added, for about `seconds` at most."""
        deadline = time.monotonic() + seconds
        try:
            with self.path.open("rb") as file:
                while not (caught_up := not self._read_chunk(file)) and time.monotonic() < deadline:
                    pass
        except OSError:
            return
        self._caught_up = caught_up

    def _read_chunk(self, file: BinaryIO) -> bool:
        """Read some complete lines; return False if there are none."""
        file.seek(self.place)
        chunk = file.read(_CHUNK)
        if b"\n" not in chunk:
            chunk += file.readline()
        end = chunk.rfind(b"\n") + 1
        for line in chunk[:end].splitlines():
            self._on_line(line)
        self.place += end
        self._mark = (self._mark + chunk[:end])[-_MARK:]
        self.size = max(self.size, self.place)
        return end > 0
