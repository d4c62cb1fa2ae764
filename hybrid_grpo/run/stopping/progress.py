"""Stops a run so that nothing is lost, at points where all ranks agree on it.

A signal or a watcher (watcher.py) may ask a single rank to stop. Between the phases of a step there are stop points,
where ranks ask each other; during sampling, each rank checks for itself after every decode step. So all ranks leave at
the same point, and none waits for another that has left.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch.distributed import DistError

from hybrid_grpo.config import RunConfig
from hybrid_grpo.config.errors import RunInterrupted
from hybrid_grpo.config.fields import duration_seconds
from hybrid_grpo.distributed.ranks import all_reduce, local_ranks, rank, store, world_size
from hybrid_grpo.run.stopping.status import LAUNCHER_GONE, TIME_OVER, RankStatus, SharedStatus, own_status

_ABANDONED_AT = ("scoring", "old_logp", "update")
"""Phases before which a step can be abandoned: until then, it has only changed state of which there is a copy."""
_GRACE_S = 20.0
"""Time to reach a stop point and to save a small model."""
_BEAT_S, _LEFT = 5.0, 1 << 40
"""Seconds between two beats of a rank; and how many it adds when it leaves, more than there can be otherwise."""


@contextmanager
def heartbeat(mine: RankStatus) -> Iterator[None]:
    """A context in which ranks on several machines show each other every 5 s that they are there, without collectives.
    `mine` then says, for the watcher, from which rank nothing has been heard for the longest time. Ranks that have left
    the context without an exception are not missed."""
    if local_ranks() == world_size():
        yield
        return
    beats, own, over = store("heartbeat"), str(rank()), threading.Event()
    seen = dict.fromkeys(map(str, range(world_size())), (0, time.monotonic()))

    def beat() -> None:
        while not over.wait(_BEAT_S):
            with suppress(DistError):  # the store may be lost, and the machine of rank 0, where it is
                beats.add(own, 1)
                for other, (before, _) in seen.items():
                    if (count := beats.add(other, 0)) > before or count >= _LEFT:
                        seen[other] = count, time.monotonic()
            mine.heard, mine.silent = min((at, int(other)) for other, (_, at) in seen.items())
        mine.heard = 0.0

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        yield
        with suppress(DistError):
            beats.add(own, _LEFT)
    finally:
        over.set()


class Progress:
    """Records where this rank is in its run and, from `start` on, whether it must stop. Collectives use `device`."""

    def __init__(self, config: RunConfig | None = None, device: torch.device | None = None) -> None:
        self._config, self._device = config or RunConfig(), device
        self._shared, self._step = SharedStatus(), 0
        self._is_watched, self._deadline = False, math.inf

    def start(self) -> None:
        """From now on, stop for signals, the watcher and `run.stop_after`."""
        config, self._shared, self._is_watched = self._config, own_status(), True
        mine = self._shared.mine
        mine.grace_s, mine.stall_s = config.grace_s or _GRACE_S, config.stall_minutes * 60
        if config.stop_after:
            # Without a watcher, the process may have made other runs before this one.
            began = mine.started if mine.watcher else time.monotonic()
            self._deadline = began + duration_seconds(config.stop_after)
        if mine.watcher:
            # All ranks of the machine share the memory by now; the file would outlive watchers that are killed.
            self._shared.forget_file()
            return
        mine.asked = mine.cause = 0
        if threading.current_thread() is threading.main_thread():
            self._shared.listen([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], patience=2)

    def expect_saving(self, seconds: float) -> None:
        """Extend the grace period by the expected time of saving, unless `run.grace_s` is set."""
        if self._config.grace_s is None:
            self._shared.mine.grace_s = _GRACE_S + seconds

    def enter(self, phase: str, step: int | None = None) -> None:
        """Record the phase that begins, and the step (default: unchanged). Before the phases of scoring and training,
        this is a stop point: the call is collective, and raises RunInterrupted on all ranks if any must stop."""
        self._step = self._step if step is None else step
        self._shared.enter(phase, self._step)
        if phase in _ABANDONED_AT and self.stops():
            raise RunInterrupted("stopped")

    def heartbeat(self) -> None:
        self._shared.beat()

    def check_stop(self) -> None:
        """Record a sign of life, and raise RunInterrupted, on this rank alone, if it was asked to stop."""
        self.heartbeat()
        if self.stop_requested():
            raise RunInterrupted("stopped")

    def stops(self) -> bool:
        """Return whether any rank was asked to stop. Collective."""
        requested = torch.tensor(int(self.stop_requested()), device=self._device)
        return self._is_watched and bool(all_reduce(requested, "max"))

    def stop_reason(self) -> str:
        """Return why the ranks stop. Collective."""
        cause = int(all_reduce(torch.tensor(self._shared.mine.cause, device=self._device), "max"))
        named = {LAUNCHER_GONE: "the launcher has ended", TIME_OVER: "run.stop_after has passed"}
        return named.get(cause) or signal.Signals(cause).name

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to stop."""
        if time.monotonic() > self._deadline:
            self._shared.ask(TIME_OVER)
        return bool(self._shared.mine.asked)
