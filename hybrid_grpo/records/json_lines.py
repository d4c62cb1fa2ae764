"""Reads JSON lines: complete files of a run, files that are still being written, and untrusted files.

`read_jsonl` refuses a damaged file. Everything else here is for programs that watch a run: time and memory are bounded
whatever a file contains, and malformed lines are skipped.
"""

import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

LONGEST = 8 * 2**20
"""Maximum length of a line in bytes; longer lines are left out."""
_DEEPEST, _MOST_VALUES = 50, 2**17
"""Limits of a line. Parsing a line is a single call, during which other threads wait: 0.1 s at most within these."""
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_END, _MOST_LAST_LINES = 2**20, 10_000
_CHUNK = 2**18
_BUFFER = 2**18
"""Bytes that are read at a time. A thread that reads more often than others look for their turn never lets them in:
they wake up each time, and find it at work again."""
_MARK = 512
"""Number of bytes to remember from the end of what was read. If they have changed, the file was replaced."""

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
    """Return the JSON object in a line; None if the line is not an object, is nested deeper than a run writes, or has
    far more values. NaN and infinity become None, and integers that are too large for a browser become floats."""
    if line[:1] not in (b"{", b" ") or _has_many_values(line):
        return None
    try:
        record = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and not _is_deep(record, line) else None


def parse_step(line: bytes) -> Record | None:
    """Like `parse`, but also return None if the line does not belong to a step."""
    record = parse(line) if b'"step"' in line else None
    step = record.get("step") if record else None
    return record if type(step) is int and 0 <= step < 2**31 else None


def _has_many_values(line: bytes) -> bool:
    if line.count(b",") <= _MOST_VALUES:
        return False
    # Commas in texts do not count; finding the texts takes long only if there are many of them.
    quotes = line.count(b'"') - line.count(b'\\"')
    return quotes > 4 * _MOST_VALUES or _TEXT.sub(b"", line).count(b",") > _MOST_VALUES


def _is_deep(record: Any, line: bytes) -> bool:
    if line.count(b"{") + line.count(b"[") <= _DEEPEST:
        return False
    level = [record]
    for _ in range(_DEEPEST):
        inside = (below for one in level for below in (one.values() if isinstance(one, dict) else one))
        level = [below for below in inside if isinstance(below, dict | list)]
        if not level:
            return False
    return True


def _whole(digits: str) -> int | float:
    return int(digits) if len(digits) < 16 else float(digits)


_DECODER = json.JSONDecoder(parse_int=_whole, parse_constant=lambda _: None)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raise OSError if it is not a regular file: a pipe would wait for its writer, and a link
    in a folder from a stranger may lead to the user's own files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return open(descriptor, "rb", buffering=_BUFFER)


def read_lines(file: BinaryIO, begin: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the offset and content of each line from the byte `begin` on. A line longer than `LONGEST` comes in parts:
    None first, then empty parts. If `begin` is inside a line, the rest of that line comes as empty parts too."""
    file.seek(max(0, begin - 1))
    is_rest = begin > 0 and file.read(1) != b"\n"
    while line := file.readline(LONGEST):
        is_whole = line.endswith(b"\n")
        is_long = len(line) == LONGEST and not is_whole
        yield begin, b"" if is_rest else None if is_long else line
        is_rest = (is_rest or is_long) and not is_whole
        begin += len(line)


def last_lines(path: Path) -> list[bytes]:
    """Return the last lines of a file, up to a MiB and `_MOST_LAST_LINES`; none if it cannot be read. The first may be
    only part of a line."""
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
            return file.read(_END).split(b"\n")[:-1][-_MOST_LAST_LINES:]
    except OSError:
        return []


class GrowingFile:
    """Reads a file line by line as it is written, each line once.

    If the file is truncated by a resumed run, or replaced by another, `on_restart` is called, and the file is read
    again from the first line. An incomplete last line is not read until it is complete. A line longer than `LONGEST`
    is read as an empty one.
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
        self._in_long_line = False

    @property
    def share_read(self) -> float:
        """Share of the file that has been read; 1 once no complete line is left to read."""
        return 1.0 if self._caught_up else min(0.999, self.place / self.size)

    def check(self) -> bool:
        """Return whether the file has been replaced or removed; if so, it will be read again from the beginning."""
        try:
            with open_file(self.path) as file:
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
            with open_file(self.path) as file:
                while not (caught_up := not self._read_chunk(file)) and time.monotonic() < deadline:
                    pass
        except OSError:
            return
        self._caught_up = caught_up

    def _read_chunk(self, file: BinaryIO) -> bool:
        """Read some complete lines, or part of a line that is too long; return False if there is neither."""
        file.seek(self.place)
        chunk = file.read(_CHUNK)
        if b"\n" not in chunk and not self._in_long_line:
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
