"""Parents and children of processes, as the Linux kernel records them."""

import ctypes
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(dies: bool = True) -> None:
    """Have the kernel kill this process when its parent ends. A parent that ended before the call goes unnoticed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if dies else 0)


def adopt_orphans() -> None:
    """Become the parent of the processes that descendants leave behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """Children of a process, from the kernel's own list if it has one: psutil takes milliseconds."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        if lists:
            return [int(child) for children in lists for child in children.split()]
        return [child.pid for child in psutil.Process(pid).children()]
    except (OSError, psutil.NoSuchProcess):
        return []


def descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on."""
    direct = children(pid)
    return direct + [descendant for child in direct for descendant in descendants(child)]


def kill(processes: Iterable[int]) -> None:
    """Kill those processes that are still there."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
