"""Shared memory in which the ranks of one machine and their watchers (watcher.py) exchange status without waiting.

Every rank has an entry, which the rank and its watcher write, and which all of them read. Times come from
`time.monotonic`, one clock for all processes of a machine. The module imports nothing that is slow to import.
"""

import ctypes
import hashlib
import mmap
import os
import signal
import tempfile
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PHASES = ("starting", "sampling", "scoring", "old_logp", "update", "evaluation", "saving", "export")
RUNNING = -1
"""`RankStatus.status` of a rank that has not ended."""
LAUNCHER_GONE, TIME_OVER = 101, 102
"""Values of `RankStatus.cause` for a stop without a signal: the launcher has ended, or `run.stop_after` has passed."""


class RankStatus(ctypes.Structure):
    """The state of one rank. Numbers are 0 until they are known."""

    watcher: int  # process id of the watcher; 0 if the rank has none
    started: float  # when the watcher began, or the process of a rank without one
    tick: float  # when the watcher last looked after its rank, or the rank was about to print an error
    status: int  # exit status of the rank, or RUNNING
    phase: int  # index into PHASES
    entered: float  # when that phase began
    step: int  # step of the run
    beat: float  # the last sign of life in the phase
    beats: int  # signs of life in the phase: decode steps, micro-batches
    asked: float  # when the rank was asked to stop
    cause: int  # the signal that asked; or LAUNCHER_GONE, TIME_OVER
    grace_s: float  # time allowed for stopping
    stall_s: float  # time without a sign of life that counts as a stall; 0: never
    stalled: float  # when this rank's watcher noticed a stall
    said: int  # checksum of the error that the rank has printed
    silent: int  # of the ranks of several machines, the one that was last heard from longest ago
    heard: float  # when that was; 0 if all are on this machine
    behind: int  # how likely it is that others wait for this rank: 0 (it waits itself) to 4


_TYPES: dict[object, Any] = {int: ctypes.c_int64, float: ctypes.c_double}
RankStatus._fields_ = [(name, _TYPES[kind]) for name, kind in RankStatus.__annotations__.items()]


class SharedStatus:
    """The entries of a run's ranks, of which those of ranks on other machines stay empty. `path` is the shared-memory
    file; without it, only this process and its forks share the entries."""

    def __init__(self, rank: int = 0, world: int = 1, path: Path | None = None) -> None:
        size = world * ctypes.sizeof(RankStatus)
        if path is None:
            memory = mmap.mmap(-1, size)
        else:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                # Unlike ftruncate, this fails if there is no memory: writing would end the process.
                os.posix_fallocate(file, 0, size)
                memory = mmap.mmap(file, size)
            finally:
                os.close(file)
        self.path, self.rank = path, rank
        self.entries = (RankStatus * world).from_buffer(memory)
        self.mine: RankStatus = self.entries[rank]
        ctypes.memset(ctypes.byref(self.mine), 0, ctypes.sizeof(RankStatus))
        self.mine.status, self.mine.started = RUNNING, time.monotonic()

    def forget_file(self) -> None:
        """Remove the file; processes that have opened it continue to share the memory."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def enter(self, phase: str, step: int) -> None:
        now = time.monotonic()
        self.mine.phase, self.mine.step, self.mine.entered = PHASES.index(phase), step, now
        self.mine.beat, self.mine.beats = now, 0

    def beat(self) -> None:
        self.mine.beat = time.monotonic()
        self.mine.beats += 1

    def ask(self, cause: int) -> None:
        """Ask this rank to stop. The first request is remembered."""
        if not self.mine.asked:
            self.mine.cause, self.mine.asked = cause, time.monotonic()

    def is_first_to_say(self, error: str, patience_s: float) -> bool:
        """Return whether this rank should print an error: no other rank of this machine, which then stays `patience_s`,
        has printed the same. A later rank waits longer for the earlier ones, unless a different error was printed."""
        self.mine.tick = time.monotonic()
        checksum, deadline = zlib.crc32(error.encode()) or 1, self.mine.tick + patience_s * self.rank / (self.rank + 1)
        while True:
            others = (entry for rank, entry in enumerate(self.entries) if rank != self.rank)
            said = {entry.said for entry in others if entry.tick > self.mine.started - patience_s}
            if checksum in said:
                return False
            if any(said) or time.monotonic() >= deadline:
                self.mine.said = checksum
                return True
            time.sleep(0.05)

    def listen(self, stops: Iterable[signal.Signals], patience: int = 1) -> None:
        """Make the signals `stops` ask this process to stop. A second SIGINT ends it at once; with a `patience` of 2,
        it raises KeyboardInterrupt, and a third ends the process."""
        interrupts = [0]

        def hear(number: int, _: object) -> None:
            interrupts[0] += number == signal.SIGINT
            if interrupts[0] > patience:
                os._exit(128 + number)
            self.ask(number)
            if interrupts[0] > 1:
                raise KeyboardInterrupt

        for number in stops:
            signal.signal(number, hear)


def shared_status() -> SharedStatus:
    """Return the status that is shared by the ranks that the environment describes."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "1")
    if world == "1" or not rank.isdecimal() or not world.isdecimal() or not int(rank) < int(world) <= 1 << 16:
        return SharedStatus()
    # Containers may share memory without seeing each other's processes.
    meeting = (os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    name = repr((os.getuid(), os.readlink("/proc/self/ns/pid"), *meeting))
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    path = Path(folder, f"hybrid_grpo_{os.getuid()}_{hashlib.sha256(name.encode()).hexdigest()[:16]}")
    try:
        return SharedStatus(int(rank), int(world), path)
    except OSError:  # no memory, or not ours: each rank is watched alone
        return SharedStatus()


_of_this_process: list[SharedStatus] = []


def own_status() -> SharedStatus:
    """Return the status that this process shares with its watcher, or one of its own if it has no watcher."""
    if not _of_this_process:
        _of_this_process.append(SharedStatus())
    return _of_this_process[0]


def set_own_status(shared: SharedStatus) -> None:
    _of_this_process[:] = [shared]
