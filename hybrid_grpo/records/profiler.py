"""Profiles single steps with torch's profiler, for log.profile: shows which operations each stage spends time on."""

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from hybrid_grpo.model.ranks import rank
from hybrid_grpo.records.metrics.meter import Meter

STAGE = "stage/"
"""Prefix of the stages' names in a profile."""
_SHOWN = 10
"""Number of operations that the table shows for each stage."""


class Profiler:
    """Profiles the steps in `steps`. Every rank writes its trace to the folder, and rank 0 also writes a table. If
    writing fails, a warning is printed and the run goes on."""

    def __init__(self, steps: Sequence[int], folder: Path) -> None:
        self._steps, self._folder = frozenset(steps), folder

    @contextmanager
    def step(self, step: int, meter: Meter) -> Iterator[None]:
        """Profile the `with` block if `step` is in `steps`. The meter records it, since profiling takes time."""
        if step not in self._steps:
            yield
            return
        meter.add("time/profiled", 1)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as traced, record_function(f"{STAGE}whole"):
            yield
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(self._folder / f"step_{step:06d}_rank{rank()}.json.gz"))
            if rank() == 0:
                text = f"step {step}, rank 0\n{table(traced.events() or ())}"
                (self._folder / f"step_{step:06d}.txt").write_text(text, encoding="utf-8")
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                print(f"WARNING: the profile of step {step} was not written: {error}", file=sys.stderr, flush=True)


def table(events: Sequence[Any]) -> str:
    """Return a table of a step's stages, each with the operations that took longest, not counting calls inside them.

    An operation belongs to the innermost stage in which it began, on any thread. The time of a GPU kernel counts for
    the operation that launched it.
    """
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    stages = sorted((e for e in on_host if e.name.startswith(STAGE)), key=lambda e: e.time_range.start)
    begins, innermost = _innermost(stages)
    spent: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0]))
    for event in on_host:
        place = bisect_right(begins, event.time_range.start) - 1
        if place < 0 or event.name.startswith(STAGE):
            continue
        row = spent[innermost[place]][event.name]
        for column, value in enumerate((event.self_cpu_time_total, event.self_device_time_total, 1)):
            row[column] += value
    lines = []
    for name in dict.fromkeys(stage.name for stage in stages):
        seconds = [stage.time_range.elapsed_us() / 1e6 for stage in stages if stage.name == name]
        lines.append(f"\n{name.removeprefix(STAGE)}: {sum(seconds):.3f} s in {len(seconds)} parts")
        lines.append(f"{'host ms':>12}{'GPU ms':>12}{'calls':>10}  operation")
        rows = sorted(spent[name].items(), key=lambda item: -max(item[1][:2]))[:_SHOWN]
        lines += [f"{host / 1000:12.1f}{gpu / 1000:12.1f}{calls:10.0f}  {of}" for of, (host, gpu, calls) in rows]
    return "\n".join(lines) + "\n"


def _innermost(stages: list[Any]) -> tuple[list[float], list[str]]:
    """Return the times at which the innermost stage changes, and for each time the name of the stage that then becomes
    innermost, empty outside all stages. `stages` are sorted by their start, and any two are nested or disjoint."""
    begins: list[float] = []
    names: list[str] = []
    around: list[Any] = []
    for stage in [*stages, None]:
        now = float("inf") if stage is None else stage.time_range.start
        while around and around[-1].time_range.end <= now:
            begins.append(around.pop().time_range.end)
            names.append(around[-1].name if around else "")
        if stage is not None:
            around.append(stage)
            begins.append(now)
            names.append(stage.name)
    return begins, names
