"""Shows a run in the terminal or in a notebook: how far it is, and one line of numbers with their names."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from html import escape
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Columns of a line where the width of the terminal is not known."""

_NUMBERS = (
    ("reward/mean", "reward {:z.3f}"), ("sft/loss", "loss {:.4f}"), ("held out", "held out {:.3f}"),
    ("completion/length_mean", "length {:.1f}"), ("time/step_s", "{:.2f} s/step"), ("left", "left {}"),
    ("policy/kl", "kl {:z.4f}"), ("policy/entropy", "entropy {:.2f}"),
    ("throughput/generated_tokens_per_s", "{:,.0f} tok/s sampling"),
    ("throughput/trained_tokens_per_s", "{:,.0f} tok/s training"), ("policy/grad_norm", "grad {:.2f}"),
)  # fmt: skip
"""What a line shows, the most important first. `held out`: the accuracy on the first held-out set, if measured."""
_ACCURACY = re.compile("eval/[^/]+/accuracy")
"""The accuracy on a held-out set. Parts of the training data, such as a source, have an `accuracy` too."""


def is_plain() -> bool:
    """Whether a terminal is to receive no control characters."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def make_console(**options: Any) -> Console:
    """Return a console of rich, without bold type and bars if the terminal is plain."""
    return Console(force_terminal=False if is_plain() else None, **options)


def make_table(first: str, others: Iterable[str]) -> Table:
    """Return a table without rows, of a column of names, whose title is `first`, and columns of numbers."""
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def display_for(steps: int, done: int = -1) -> ConsoleSink | NotebookSink:
    """Return the display for where this process runs: a notebook's cell, a terminal, or a file or pipe."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return NotebookSink(steps, done) if hasattr(shell, "kernel") else ConsoleSink(steps, done)


class Progressing:
    """How far a run is, and how long the rest will take at the pace so far."""

    def __init__(self, steps: int, done: int) -> None:
        self.steps, self._first, self._start = steps, max(done, 0), time.monotonic()
        self._set = ""

    def line(self, step: int, values: Mapping[str, float], width: int) -> str:
        """Return the numbers of a step by name, as many of the most important as fit into `width` columns."""
        line, known = "", {**values, "held out": self.held_out(values), "left": self.left(step)}
        for name, text in _NUMBERS:
            part = "" if known.get(name) is None else text.format(known[name])
            if part and len(line) + len(part) + 2 <= width:
                line += f"  {part}" if line else part
        return line

    def held_out(self, values: Mapping[str, float]) -> float | None:
        """Return the accuracy on the first held-out set; None if it was not measured."""
        # An evaluation before the first step names all sets, in order.
        self._set = self._set or next(filter(_ACCURACY.fullmatch, values), "")
        return values.get(self._set)

    def left(self, step: int) -> timedelta | None:
        """Return the time that the remaining steps will take; None before the first and after the last."""
        if not self._first < step < self.steps:
            return None
        seconds = (time.monotonic() - self._start) / (step - self._first) * (self.steps - step)
        return timedelta(seconds=int(seconds))


class ConsoleSink:
    """Shows a progress bar with a live line of metrics, or, without a terminal or with NO_COLOR, about 200 lines."""

    def __init__(self, steps: int, done: int = -1, stream: TextIO | None = None) -> None:
        self._stream, self._progress = stream or sys.stdout, Progressing(steps, done)
        self._live: Live | None = None
        if self._stream.isatty() and not is_plain():
            self._bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
            self._task = self._bar.add_task("", total=steps, completed=max(done, 0))
            # Lines that others print above the bar are not wrapped: they may be a command to copy.
            self._live = Live(self._bar, console=Console(file=self._stream, force_terminal=True, soft_wrap=True))
            self._live.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        steps = self._progress.steps
        if self._live:
            width = max(shutil.get_terminal_size((WIDTH, 24)).columns, 40)
            numbers = Text(self._progress.line(step, values, width), overflow="ellipsis", no_wrap=True)
            self._bar.update(self._task, completed=step)
            self._live.update(Group(self._bar, numbers))
            return
        begins = f"step {step:{len(str(steps))}d}/{steps}  "
        numbers_text = self._progress.line(step, values, WIDTH - len(begins))
        if step % max(1, steps // 200) == 0 or step == steps or any(map(_ACCURACY.fullmatch, values)):
            with suppress(OSError):  # nobody reads it anymore
                print(begins + numbers_text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._live:
            self._live.stop()


class NotebookSink:
    """Shows a bar, a line of metrics, and curves of reward or loss and of accuracy in a cell, as plain HTML."""

    CURVES = (("reward/mean", "reward"), ("sft/loss", "loss"), ("accuracy", "held out"))
    EVERY_S = 0.5

    def __init__(self, steps: int, done: int = -1, show: Callable[[str], Any] | None = None) -> None:
        """`show` displays HTML in place of what it displayed before. Default: in the cell that is being executed."""
        self._progress, self._show = Progressing(steps, done), show or _shown_in_cell()
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self._new: tuple[int, dict[str, float]] | None = None
        self._shown = -math.inf

    def write(self, step: int, values: dict[str, float]) -> None:
        known: dict[str, Any] = {**values, "accuracy": self._progress.held_out(values)}
        for name, label in self.CURVES:
            if known.get(name) is not None and math.isfinite(known[name]):
                self._curves.setdefault(label, []).append((step, known[name]))
        self._new = step, values
        if time.monotonic() - self._shown >= self.EVERY_S or step == self._progress.steps:
            self.close()

    def close(self) -> None:
        """Show the newest step, if it is not shown yet."""
        if self._new is None:
            return
        (step, values), steps = self._new, self._progress.steps
        numbers = escape(self._progress.line(step, values, 120))
        curves = "".join(spark_line(label, points) for label, points in self._curves.items() if len(points) > 1)
        self._show(
            f'<div style="font-family:sans-serif"><progress max="{steps}" value="{step}" style="width:16em"></progress>'
            f" step {step}/{steps} &nbsp; <code>{numbers}</code><br>{curves}</div>"
        )
        self._new, self._shown = None, time.monotonic()


def spark_line(label: str, points: Sequence[tuple[float, float]], width: int = 300, height: int = 70) -> str:
    """Return a small curve as SVG, with its name and its lowest and highest value. Long curves are thinned."""
    points = points[:: -max(1, len(points) // width)][::-1]  # the last one stays
    first, last = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    across, up = width / ((last - first) or 1), (height - 20) / ((high - low) or 1)
    path = " ".join(f"{(x - first) * across:.1f},{height - 4 - (y - low) * up:.1f}" for x, y in points)
    return (
        f'<svg width="{width}" height="{height}" style="margin-right:1em"><text x="0" y="11" font-size="11"'
        f' fill="currentColor">{escape(label)} {points[-1][1]:.4g} (from {low:.4g} to {high:.4g})</text>'
        f'<polyline points="{path}" fill="none" stroke="#3b7dd8" stroke-width="1.5"/></svg>'
    )


def _shown_in_cell() -> Callable[[str], Any]:
    from IPython.display import HTML, display  # type: ignore[import-not-found, unused-ignore]

    handle = display(HTML(""), display_id=True)
    return lambda html: handle.update(HTML(html))
