"""The lock on a run's folder, which ensures that at most one run writes there.

On one machine, and on file systems whose locks reach other machines, a POSIX lock on the file `.lock` decides; the
kernel releases it however its process ends. Elsewhere the owner's heartbeat decides: a counter in the file that rises
while the owner is alive. `python -m hybrid_grpo.records.lock FOLDER` exits with status 2 if a run holds the lock.
"""

import fcntl
import json
import os
import socket
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybrid_grpo.config.errors import UserError

_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 20.0
"""An owner on another machine counts as gone when its counter has not risen for this long."""
_LENGTH = 512


def state_of(folder: Path) -> str | None:
    """Return "running" if a run holds the lock on the folder, "ended" if it released it, "gone" if it vanished without
    releasing it, and None if there never was one. Only looks at the file, which its owner writes every few seconds."""
    try:
        found = (folder / ".lock").stat()
    except OSError:
        return None
    if not found.st_size:
        return "ended"
    # A process that computes may be late with its heartbeat.
    return "running" if time.time() - found.st_mtime < 3 * _SILENT_SECONDS else "gone"


class FolderLock:
    """This process's lock on an existing folder. Raises UserError if another process holds the lock (the message names
    that process), and OSError if the lock file cannot be written."""

    def __init__(self, folder: Path) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._owner: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "since": now, "beat": 0}
        self._file = _locked(folder)
        self._write()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock, so that a run on any machine can use the folder."""
        self._ended.set()
        # On another machine only the file shows that this run has ended.
        os.ftruncate(self._file, 0)
        os.close(self._file)

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            self._owner["beat"] += 1
            try:
                self._write()
            except OSError:  # such as a full disk: the POSIX lock still holds
                continue

    def _write(self) -> None:
        # All writes have one length and are single calls, so a reader never sees parts of two.
        os.pwrite(self._file, json.dumps(self._owner).encode().ljust(_LENGTH), 0)


def _locked(folder: Path) -> int:
    """Lock the file `.lock` and return its descriptor; closing any descriptor of that file would release the lock.
    Raise UserError if another process holds the lock."""
    path = folder / ".lock"
    _refuse_other_machine(path)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(file)
        raise _refusal(folder, _read(path)) from None
    return file


def _refuse_other_machine(path: Path) -> None:
    owner = _read(path)
    if owner.get("host", socket.gethostname()) == socket.gethostname():
        return
    deadline = time.monotonic() + _SILENT_SECONDS
    while (later := _read(path)) == owner and time.monotonic() < deadline:
        time.sleep(_SILENT_SECONDS / 20)
    if later and later != owner:
        raise _refusal(path.parent, later)


def _read(path: Path) -> dict[str, Any]:
    """Return the owner that the lock file names, if any. It is reopened each time, as network file systems need it."""
    try:
        owner = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _refusal(folder: Path, owner: dict[str, Any]) -> UserError:
    who = f"process {owner['pid']} on {owner['host']} since {owner['since']}" if "pid" in owner else "another process"
    return UserError(
        f"run.name {folder.name}: {folder} belongs to a run that is under way ({who}): wait for it, stop it, or pass"
        " another --run.name"
    )


if __name__ == "__main__":
    try:
        if Path(sys.argv[1], ".lock").exists():
            _locked(Path(sys.argv[1]))
    except UserError as held:
        print(f"hybrid-grpo: error: {held}", file=sys.stderr)
        sys.exit(2)
