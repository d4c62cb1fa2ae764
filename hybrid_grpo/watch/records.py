"""Files of a run's folder as those of a stranger: whatever they hold, they are read with bounds, and what is none of
what is looked for is passed over."""

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

LONGEST = 8 * 2**20
"""Bytes of a line; longer ones are left out."""
_DEEPEST = 50
_LETTERS = 200
_END = 2**20

Record = dict[str, Any]


def open_file(path: Path) -> BinaryIO:
    """Open a file to read it. Raises OSError also for what is not a plain file: a pipe would wait for its writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no plain file", str(path))
    return open(descriptor, "rb")


def read_lines(file: BinaryIO, begin: int) -> Iterator[tuple[int, bytes | None]]:
    """Byte and content of each line from a byte on. A line that is longer than `LONGEST` comes in several parts, None
    first and empty ones then; so does the rest of a line that begins before `begin`, which is empty."""
    file.seek(max(0, begin - 1))
    is_rest = begin > 0 and file.read(1) != b"\n"
    while line := file.readline(LONGEST):
        is_whole = line.endswith(b"\n")
        is_long = len(line) == LONGEST and not is_whole
        yield begin, b"" if is_rest else None if is_long else line
        is_rest = (is_rest or is_long) and not is_whole
        begin += len(line)


def last_lines(path: Path) -> list[bytes]:
    """Whole lines at the end of a file, about a megabyte; none where it cannot be read. The first may be a part."""
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
            return file.read(_END).split(b"\n")[:-1]
    except OSError:
        return []


def parse(line: bytes) -> Record | None:
    """The object of a line; None where it is none, or deeper than a run writes. NaN is None, and whole numbers that are
    too large for a browser are floats."""
    if line[:1] not in (b"{", b" "):
        return None
    try:
        record = _DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and not _is_deep(record, line) else None


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


def number(value: Any) -> float | None:
    """A number that can be reckoned with; None for anything else."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def brief(value: Any) -> str | float | None:
    """A number, or the beginning of a text; None for anything else."""
    return value[:_LETTERS] if isinstance(value, str) else number(value)
