"""Removes files in shared memory that runs leave behind which are killed at once. Nothing here is slow to import."""

import os
import time
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/dev/shm")
_STATUS = f"hybrid_grpo_{os.getuid()}_"
_STALE_SECONDS = 3600.0
"""An older shared status (status.py) that no process uses is left over. A younger one may be in use in another
container, whose processes are not seen here, until models are loaded."""


def unlink_leftovers() -> None:
    """Unlink the files of runs whose processes are all gone."""
    found = []
    for path in _MEMORY.glob(f"{_STATUS}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                found.append(path)
    maps = []
    for entry in Path("/proc").glob("[0-9]*/maps") if found else ():
        with suppress(OSError):
            maps.append(entry.read_text(errors="replace"))
    used = "".join(maps)
    for path in found:
        if f"{path}\n" not in used:
            with suppress(OSError):
                path.unlink()
