"""A file of lines as it is written: what is new is read, by its place in the file, and nothing twice."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hybrid_grpo.watch.records import LONGEST, open_file

_CHUNK = 2**18
_MARK = 512
"""Bytes before the place that has been read to. Where they have changed, the file is another one."""


class GrowingFile:
    """Reads a file line by line.

    A resumed run cuts the file and writes it on, and a folder may be replaced by another: the lines are read from the
    first one then, after `on_restart` has been called. A last line without its end is left until it is whole. Of a
    line longer than `LONGEST` an empty one is left.
    """

    def __init__(self, path: Path, on_line: Callable[[bytes], None], on_restart: Callable[[], None]) -> None:
        self.path = path
        self._on_line, self._on_restart = on_line, on_restart
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        """Bytes of the file when it was last looked at."""
        self.place = 0
        """Bytes that have been read."""
        self._caught_up = True
        self._mark = b""
        self._in_long_line = False

    @property
    def share_read(self) -> float:
        """Share of the file that has been read; 1 where no whole line is left."""
        return 1.0 if self._caught_up else min(0.999, self.place / self.size)

    def check(self) -> bool:
        """Look at the file; whether it is another one than before, or gone, so that all is read again."""
        try:
            with open_file(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(self.place - len(self._mark))
                changed = size < self.place or file.read(len(self._mark)) != self._mark
        except OSError:  # there is none (any more)
            size, changed = 0, self.size > 0
        if changed:
            self._begin()
            self._on_restart()
        self.size = size
        return changed

    def read(self, seconds: float) -> None:
        """Read the lines that have come since, for about so many seconds at most."""
        deadline = time.monotonic() + seconds
        try:
            with open_file(self.path) as file:
                while not (caught_up := not self._read_chunk(file)) and time.monotonic() < deadline:
                    pass
        except OSError:
            return
        self._caught_up = caught_up

    def _read_chunk(self, file: BinaryIO) -> bool:
        """Read some whole lines, or a part of one that is too long; False where there are none."""
        file.seek(self.place)
        chunk = file.read(_CHUNK)
        if b"\n" not in chunk:
            chunk += file.read(LONGEST - len(chunk))
        begin, end = 0, chunk.rfind(b"\n") + 1
        if self._in_long_line:
            begin = chunk.find(b"\n") + 1
            self._in_long_line = not begin
            end = end or len(chunk)
        elif not end and len(chunk) >= LONGEST:
            self._in_long_line = True
            self._on_line(b"")
            begin = end = len(chunk)
        for line in chunk[begin:end].splitlines() if not self._in_long_line else ():
            self._on_line(line)
        self.place += end
        self._mark = (self._mark + chunk[:end])[-_MARK:]
        self.size = max(self.size, self.place)
        return end > 0
