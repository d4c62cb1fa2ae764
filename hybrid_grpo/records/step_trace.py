"""The trace of a step shows where its time went: its stages on every rank, and the timeline of decoding.

Every rank collects its part during the step; `sinks.py` gathers the parts once per step and writes them to
details.jsonl. docs/watch.md explains the format.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from hybrid_grpo.config import LogConfig
from hybrid_grpo.distributed.ranks import world_size
from hybrid_grpo.generation import Timeline
from hybrid_grpo.records.metrics.meter import Span

_MOMENTS = 512
"""Maximum number of moments of decoding in a step's trace, for all ranks together; a rank's share is at least 8."""


class StepTrace:
    """Collects this rank's part of each step's trace, unless `log.details` is off or `config` is None."""

    def __init__(self, config: LogConfig | None = None) -> None:
        self._on = config is not None and config.details
        self._timelines: list[Timeline] = []

    def begin(self, step: int) -> None:
        self._timelines = []

    def decoded(self, timeline: Timeline | None) -> None:
        """Add the timeline of a rollout, which is None if nothing was decoded."""
        if timeline is not None:
            self._timelines.append(timeline)

    def own(self, spans: Sequence[Span]) -> dict[str, Any] | None:
        """Return this rank's part of the step's trace, with the `spans` of its stages; None if nothing is collected."""
        start = next((begin for name, begin, _ in spans if name == "step"), None)
        if not self._on or start is None:
            return None
        within = sorted((begin, end, name) for name, begin, end in spans if name != "step" and begin >= start)
        most = max(8, _MOMENTS // world_size())
        return {
            "stages": [[name, _time(begin - start), _time(end - start)] for begin, end, name in within],
            "decoder": _moments(self._timelines, start, most) if self._timelines else None,
        }


def trace_line(step: int, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a step's line of details.jsonl, made from the parts of all ranks."""
    line: dict[str, Any] = {"step": step, "stages": [part["stages"] for part in parts]}
    if any(part["decoder"] for part in parts):
        line["decoder"] = [part["decoder"] for part in parts]
    return line


def _moments(timelines: list[Timeline], start: float, most: int) -> dict[str, Any]:
    """Join the timelines of a step's rollouts, thinned to at most `most` moments, which include the last one."""
    at = list(chain.from_iterable(timeline.at for timeline in timelines))
    apart = -(-len(at) // most)
    kept = list(range(len(at)))[::-apart][::-1]
    line: dict[str, Any] = {"t": [_time(at[moment] - start) for moment in kept]}
    for name in ("decoding", "waiting", "queued"):
        values = list(chain.from_iterable(getattr(timeline, name) for timeline in timelines))
        line[name] = [values[moment] for moment in kept]
    line["slots"] = max(timeline.slots for timeline in timelines)
    line["pages_used_max"] = float(f"{max(timeline.pages_used_max for timeline in timelines):.4g}")
    return line


def _time(seconds: float) -> float:
    return round(seconds, 4)
