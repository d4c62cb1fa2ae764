"""The timeline of decoding: how many sequences were being decoded, waiting or queued at each moment.

It reads the host's own lists, so nothing waits for a GPU.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from hybrid_grpo.generation.scheduler import Scheduler

POINTS = 64
"""Maximum number of moments that are kept."""


class Timeline:
    """The state of a scheduler at moments that are evenly spaced, to within a step.

    Every step is a moment at first. Whenever there are `POINTS` of them, every other one is dropped, and the distance
    doubles.

    Attributes:
        at: seconds of `clock`; this and the next three lists have one entry for each moment.
        decoding: number of sequences being decoded.
        waiting: number of sequences between two turns, whose answers have not arrived or have not been read.
        queued: number of sequences that have no slot yet, or were preempted.
        slots: maximum number of sequences that are decoded at the same time.
        pages_used_max: share of the cache's pages in use at the fullest moment.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._next, self._apart = -1.0, 0.0
        self.at: list[float] = []
        self.decoding: list[int] = []
        self.waiting: list[int] = []
        self.queued: list[int] = []
        self.slots, self.pages_used_max = slots, 0.0

    def look(self, schedule: Scheduler) -> None:
        """Record this moment if enough time has passed since the last one."""
        now = self._clock()
        if now >= self._next:
            self._note(now, schedule)

    def end(self, schedule: Scheduler) -> None:
        """Record the last moment."""
        self._note(self._clock(), schedule)
        self.pages_used_max = schedule.cache.peak / (schedule.cache.pages - 1)

    def _note(self, now: float, schedule: Scheduler) -> None:
        self.at.append(now)
        self.decoding.append(len(schedule.active))
        self.waiting.append(len(schedule.waiting) + len(schedule.answered))
        self.queued.append(
            sum(len(group.sequences) for groups in (schedule.pending, schedule.ready) for group in groups)
        )
        if len(self.at) == POINTS:
            for values in (self.at, self.decoding, self.waiting, self.queued):
                del values[1::2]
            self._apart = 2 * (now - self.at[0]) / (POINTS - 1)
        self._next = self.at[-1] + self._apart


@dataclass
class Stats:
    """Statistics of a call of `generate`."""

    steps: int = 0
    """Forward passes of the decode loop."""
    rows: int = 0
    """Total rows of these passes: one for each sampled token, and for each that came after the end of a turn."""
    context: int = 0
    """Cache entries that these rows attended to."""
    prefills: int = 0
    """Number of prompts read; a preempted sequence that is read again is counted again."""
    answers: int = 0
    """Number of answers between turns that were added to an existing cache."""
    preempted: int = 0
    """Number of sequences that lost their pages while they were being decoded or waiting."""
    peak_cache_bytes: int = 0
    captures: int = 0
    """Number of forwards captured as CUDA graphs."""
    timeline: Timeline | None = None
    """None with the fallback, and if nothing was decoded."""
