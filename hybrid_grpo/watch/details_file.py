"""details.jsonl: what a run noted of each step beside its numbers.

One step is found by bisection, since the lines are in the order of their steps. Rewards of prompts and histograms of
all steps are gathered by reading the file once, as it is written.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

from hybrid_grpo.watch.growing_file import GrowingFile
from hybrid_grpo.watch.histograms import Histograms
from hybrid_grpo.watch.prompt_rewards import PromptRewards

_STEP = re.compile(rb'\{\s*"step":\s*(\d+)\s*[,}]')
_NEAR = 2**18
"""Bytes that are read line by line rather than bisected on."""
_END = 2**20

Details = dict[str, Any]


class DetailsFile:
    """Gathers `rewards` and `histograms` of a details.jsonl; nothing is read before `read` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = GrowingFile(path, self._take, self._begin)
        self._begin()

    def _begin(self) -> None:
        self.rewards, self.histograms = PromptRewards(), Histograms()

    @property
    def share_read(self) -> float:
        """Share of the file that has been gathered."""
        return self._lines.share_read

    @property
    def changed_ms(self) -> int:
        """When the file was last written, in milliseconds; 0 where there is none."""
        try:
            return self.path.stat().st_mtime_ns // 10**6
        except OSError:
            return 0

    def read(self, seconds: float) -> None:
        """Gather what has been written since, for about so many seconds at most."""
        self._lines.check()
        self._lines.read(seconds)

    def _take(self, line: bytes) -> None:
        # What follows is most of the line, and nothing of it is gathered.
        kept, cut, _ = line.partition(b'"stages":')
        details = _parse(kept.rstrip(b", ") + b"}" if cut else line)
        if details is not None:
            self.rewards.append(details["step"], details.get("prompts"))
            self.histograms.append(details["step"], details.get("histograms"))


def read_step(path: Path, step: int | None) -> Details | None:
    """What was noted of the newest step that is not after `step` (None: of all); None where there is no such step."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END) if step is None else _before(file, size, step))
            found = None
            for line in file:
                number = _step(line)
                if number is not None and step is not None and number > step:
                    break
                if number is not None:
                    found = line
    except OSError:
        return None
    return None if found is None else _parse(found)


def _before(file: BinaryIO, size: int, step: int) -> int:
    """A byte, where a line begins, from which on the step is found within about `_NEAR` bytes."""
    low, high = 0, size
    while high - low > _NEAR:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        start = file.tell()
        number = next((number for number in map(_step, file) if number is not None), None) if start < high else None
        if number is None or number > step:
            high = middle
        else:
            low = start
    return low


def first_step(path: Path) -> int | None:
    """The first step of a file."""
    try:
        with path.open("rb") as file:
            return next((number for number in map(_step, file) if number is not None), None)
    except OSError:
        return None


def _step(line: bytes) -> int | None:
    """The step of a whole line."""
    match = _STEP.match(line) if line.endswith(b"\n") else None
    return int(match[1]) if match else None


def _parse(line: bytes) -> Details | None:
    """The object of a line; None where it is none of details.jsonl."""
    try:
        details = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return details if isinstance(details, dict) and type(details.get("step")) is int else None
