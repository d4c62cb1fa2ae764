"""Removes files in shared memory that ranks killed during start-up leave behind: 66 MiB each, until the next boot.

A rank that has connected to the others unlinks its buffer (`ranks.release_shared_memory`). If a rank is killed before
that, the watcher of any rank unlinks it; if all are killed at once, the next run does. Nothing here is slow to import.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/dev/shm")
_BUFFER, _STATUS = f"deepspeed_allreduce_buffer_{os.getuid()}_", f"hybrid_grpo_{os.getuid()}_"
_STALE_SECONDS = {_BUFFER: 60.0, _STATUS: 3600.0}
"""An older file that no process uses is left over. A younger file may be in use in another container, whose processes
are not seen here: a buffer while ranks connect, a shared status (see status.py) until models are loaded."""


def unlink_buffers(*, all_ranks: bool) -> None:
    """Unlink the buffers of this rank, or those of all ranks of a run that cannot continue."""
    address, port, rank = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    if address and port and rank:
        for path in _MEMORY.glob(f"{_BUFFER}{address}_{port}_{'*' if all_ranks else rank}"):
            path.unlink(missing_ok=True)


def unlink_leftovers() -> None:
    """Unlink the files of runs whose processes are all gone."""
    found = []
    for prefix, seconds in _STALE_SECONDS.items():
        for path in _MEMORY.glob(f"{prefix}*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > seconds:
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
