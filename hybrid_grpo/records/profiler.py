"""Profiles single steps with torch's profiler, for log.profile: shows which operations each stage spends time on."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hybrid_grpo.distributed.ranks import rank
from hybrid_grpo.records.metrics.meter import Meter

STAGE = "stage/"
"""Prefix of the stages' names in a profile."""


class Profiler:
    """Profiles the steps in `steps`. Every rank writes its trace to the folder, and rank 0 also writes a table. If
    writing fails, a warning is printed and the run continues."""

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
                table = traced.key_averages().table("cpu_time_total", row_limit=60, max_name_column_width=60)
                text = f"step {step}, rank 0\n{table}\n"
                (self._folder / f"step_{step:06d}.txt").write_text(text, encoding="utf-8")
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                print(f"WARNING: the profile of step {step} was not written: {error}", file=sys.stderr, flush=True)
