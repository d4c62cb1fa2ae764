"""Keeps what a run prints in its folder, so that a run that failed can say why to whoever looks at it later."""

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

CONSOLE_FILE = "console.log"
_MOST_BYTES = 2**20
"""Size at which the file is begun anew; the one before is kept as `console.log.1`."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
"""Sequences by which terminals are steered."""


class ConsoleLog:
    """Copies what this process prints to `console.log` in a folder, until it is closed. Lines that a live display draws
    again and again are left out. A file that cannot be written is given up."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / CONSOLE_FILE
        self._file: TextIO | None = None
        self._streams = {name: _Copied(getattr(sys, name), self._write) for name in ("stdout", "stderr")}
        for name, stream in self._streams.items():
            setattr(sys, name, stream)

    def close(self) -> None:
        """Give the streams back. The exception that is under way, if there is one, becomes the last line."""
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.stream)
        if error := sys.exc_info()[1]:
            self._write(f"{type(error).__name__}: {error}\n")
        if self._file:
            self._file.close()
        self._file, self._path = None, Path()

    def _write(self, text: str) -> None:
        if "\x1b[2K" in text or "\x1b[1A" in text or not self._path.name:
            return
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8", errors="replace")
            self._file.write(_CONTROL.sub("", text))
            self._file.flush()
            if self._file.tell() > _MOST_BYTES:
                self._file.close()
                self._file = None
                self._path.replace(self._path.with_name(CONSOLE_FILE + ".1"))
        except (OSError, ValueError):
            self._path = Path()


class _Copied:
    """A stream whose text is also given to `write_copy`; in all else it is the stream itself."""

    def __init__(self, stream: TextIO, write_copy: Any) -> None:
        self.stream, self._write_copy = stream, write_copy

    def write(self, text: str) -> int:
        with suppress(RuntimeError):  # such as an interpreter that shuts down
            self._write_copy(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
