"""A run that is watched: its metrics, settings and alarms, which are read from its folder on demand."""

import itertools
import math
import re
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hybrid_grpo.config.recipes import load_yaml
from hybrid_grpo.records.alarm_records import ALARMS_FILE, AlarmRecord, joined
from hybrid_grpo.records.console_log import CONSOLE_FILE
from hybrid_grpo.records.files import rollout_files
from hybrid_grpo.records.json_lines import parse_step
from hybrid_grpo.records.lock import state_of
from hybrid_grpo.records.metrics.catalogue import TIME_METRICS, TOKEN_METRICS, find
from hybrid_grpo.records.trackers.growing_files import last_lines
from hybrid_grpo.watch.metrics_file import MetricsFile, last_row
from hybrid_grpo.watch.rollouts import number
from hybrid_grpo.watch.table import Column, Table

AXES = ("step", "tokens", "hours")
"""The x axes of curves: steps, tokens so far (sampled or, in a supervised run, trained on), and hours worked so far."""
_TELLING = (
    *("eval/[^/]+/accuracy", "reward/mean", "sft/loss"),
    *("completion/length_mean", "policy/entropy", "throughput/generated_tokens_per_s"),
)
"""Patterns of the metrics by which runs are compared at a glance."""
_MOST_ALARMS = 1000
_CLOSEST = "health/closest/"
"""Metrics of how far the alarm that is closest to its limit has come."""
NOTES_FILE = "notes.md"
"""File in which a reader may write what a run was for."""
_CONSOLE_LINES = 400
"""Number of lines at the end of what a run has printed that are shown."""
_BEST: dict[str, Callable[[Column], Any]] = {"accuracy": np.argmax, "/loss": np.argmin}
"""Functions that find the index of the best value, by the end of a metric's name."""
_VERSIONS = itertools.count(time.time_ns() // 10**6)
"""Numbers that never repeat, so that a page notices when a server or a folder has been replaced."""


class WatchedRun:
    """A run in a folder. Nothing is read before it is requested, and only `refresh` reads new metrics."""

    def __init__(self, name: str, folder: Path) -> None:
        """`name` is the run's name on the page, which is unique among the watched runs."""
        self.name, self.folder = name, folder
        self.lock = threading.Lock()
        """Held while metrics are read."""
        self._cached: dict[str, tuple[int, Any]] = {}
        """By path in the folder, the time of the path's last change, and what was read from it."""
        self.numbers = MetricsFile(folder / "metrics.jsonl")
        self.version = next(_VERSIONS)
        """Changes whenever the metrics have changed."""
        self._summary: tuple[int, dict[str, Any]] = (-1, {})

    def refresh(self, seconds: float) -> None:
        """Read the metrics written since the last call, for about `seconds` at most."""
        if self.numbers.read(seconds):
            self.version = next(_VERSIONS)

    @property
    def table(self) -> Table:
        """The metrics; while a large file is being read, a sample of lines from all over it."""
        return self.numbers.shown

    def changed_ms(self, name: str) -> int:
        """Return when a file in the folder was last written, in milliseconds since 1970; 0 if there is no such file."""
        return _changed(self.folder / name) // 10**6

    def _of(self, name: str, read: Callable[[Path], Any], may_read: bool = True) -> Any:
        """Return the result of `read` for a path in the folder, cached until the path changes. If not `may_read`,
        return the cached result, whatever its age; None if there is none."""
        path = self.folder / name
        changed = _changed(path)
        cached = self._cached.get(name)
        if may_read and (cached is None or cached[0] != changed):
            self._cached[name] = cached = changed, read(path)
        return cached and cached[1]

    def config(self) -> tuple[str, dict[str, Any]]:
        """Return the text of config.yaml, and its settings by section; none if it is missing or damaged."""
        return _read_config(self.folder / "config.yaml")

    def rollouts(self) -> dict[int, Path]:
        files: dict[int, Path] = self._of("rollouts", rollout_files)
        return files

    def axis(self, name: str) -> Column:
        """Return the position of each row of the table on one of `AXES`, [rows]."""
        steps = self.table.column("step")
        if name == "step":
            return steps
        # While a large file is being read, each row stands for all steps since the row before.
        gaps = np.diff(steps, prepend=steps[:1] - 1)
        metrics = TIME_METRICS if name == "hours" else TOKEN_METRICS
        parts = np.nan_to_num([self.table.column(metric) for metric in metrics])
        total: Column = np.cumsum(parts.sum(axis=0) * gaps)
        return total / 3600 if name == "hours" else total

    def console(self, may_read: bool = True) -> list[str]:
        """Return the last lines that the run has printed; empty if none were kept. See `outline`."""
        lines = self._of(CONSOLE_FILE, lambda path: last_lines(path)[-_CONSOLE_LINES:], may_read) or []
        return [line.decode(errors="replace") for line in lines if line.strip()]

    def alarms(self) -> list[AlarmRecord]:
        """Return the alarms that have gone off, with the run's own messages."""
        return self._of(
            ALARMS_FILE, lambda path: joined(filter(None, map(parse_step, last_lines(path))))[-_MOST_ALARMS:]
        )

    def outline(self, may_read: bool = True) -> dict[str, Any]:
        """Return what the list of runs shows, such as progress and the newest step's age; reads no more than that, and
        only the times of files if not `may_read`."""
        newest = self._of("metrics.jsonl", _newest, may_read) or {"step": None, "step_seconds": None, "reward": None}
        planned = self._of("config.yaml", _planned, may_read) or {"steps": None, "group": None, "tags": []}
        state, changed = state_of(self.folder), self.changed_ms("metrics.jsonl")
        # A run that has ended well says so by its steps.
        has_failed = state in ("ended", "gone") and newest["step"] != planned["steps"]
        last = self.console(may_read)[-1:] if has_failed else []
        return {
            "run": self.name, "folder": str(self.folder), **newest, **planned,
            "notes": self._of(NOTES_FILE, lambda path: _text(path).strip(), may_read) or "", "state": state,
            "started": self.changed_ms("config.yaml") or None, "written": changed or None,
            "last": last[0] if last else "", "age": time.time() - changed / 1e3 if changed else None,
        }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Return the metrics by which runs are compared, with the first value (None if there is only one), the newest
        value and, for accuracies and losses, the best value and its step; and the alarm that came closest to its limit,
        as a share of the way there and a metric."""
        if self._summary[0] != self.version:
            self._summary = self.version, self._summarize()
        return self._summary[1]

    def _summarize(self) -> dict[str, Any]:
        table, numbers = self.table, []
        steps = table.column("step")
        for name in (n for pattern in _TELLING for n in filter(re.compile(pattern).fullmatch, table.names)):
            values = table.column(name)
            at = np.flatnonzero(~np.isnan(values))
            metric = find(name)
            if not at.size or metric is None:
                continue
            pick = next((pick for end, pick in _BEST.items() if name.endswith(end)), None)
            best = pick(values[at]) if pick else None
            ends = {"first": float(values[at[0]]) if at.size > 1 else None, "value": float(values[at[-1]])}
            record = (None, None) if best is None else (float(values[at[best]]), int(steps[at[best]]))
            best_of = dict(zip(("best", "best_step"), record, strict=True))
            numbers.append({"name": name, "meaning": metric.meaning, **ends, **best_of})
        ways = [(table.column(name), name) for name in table.names if name.startswith(_CLOSEST)]
        highest = [(float(way.max(initial=0, where=way > 0)), name) for way, name in ways]
        hours = self.axis("hours")
        seconds = [second for second in table.column("time/step_s")[-20:].tolist() if not math.isnan(second)]
        return {
            "run": self.name, "numbers": numbers, "closest": max(highest, default=None),
            "hours": float(hours[-1]) if hours.size else 0.0,
            "step_seconds": statistics.median(seconds) if seconds else None,
        }  # fmt: skip


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a config.yaml, and its settings."""
    text, settings = _text(path), None
    with suppress(yaml.YAMLError, ValueError):
        settings = load_yaml(text)
    return text, settings if isinstance(settings, dict) else {}


def _planned(path: Path) -> dict[str, Any]:
    """Return what a config.yaml says of the run as a whole: its steps, its group and tags."""
    settings = _read_config(path)[1]
    run, log = (section if isinstance(section, dict) else {} for section in map(settings.get, ("run", "log")))
    group = log.get("group")
    return {"steps": run.get("steps"), "group": group, "tags": [*([group] if group else []), *(log.get("tags") or [])]}


def _newest(path: Path) -> dict[str, Any]:
    """Return the newest step of a metrics.jsonl, the seconds that it took, and its reward."""
    row = last_row(path) or {}
    values = {"step_seconds": "time/step_s", "reward": "reward/mean"}
    return {"step": row.get("step"), **{name: number(row.get(metric)) for name, metric in values.items()}}


def _text(path: Path) -> str:
    """Return a file as text; empty if there is no such file."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _changed(path: Path) -> int:
    """Return when a file or folder was last written, in nanoseconds since 1970; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
