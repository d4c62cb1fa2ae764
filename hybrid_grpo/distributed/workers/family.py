"""Finds, adopts and kills descendants of processes, and ties a process to its parent, by means of the Linux kernel."""

import ctypes
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(dies: bool = True) -> None:
    """Make the kernel kill this process when its parent ends; it does not notice a parent that has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL if dies else 0)


def adopt_orphans() -> None:
    """Make this process the parent of the processes that its descendants leave behind when they end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> list[int]:
    """Return a process's children; they are read from the kernel's list if possible, as psutil takes milliseconds."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        if lists:
            return [int(child) for children in lists for child in children.split()]
        return [child.pid for child in psutil.Process(pid).children()]
    except (OSError, psutil.NoSuchProcess):
        return []


def descendants(pid: int) -> list[int]:
    direct = children(pid)
    return direct + [descendant for child in direct for descendant in descendants(child)]


def kill(processes: Iterable[int]) -> None:
    """Kill the processes that still exist."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
