"""One run that is watched: its numbers, settings and alarms, read from its folder as they are asked for."""

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
from hybrid_grpo.records.alarm_records import ALARMS_FILE, AlarmRecord
from hybrid_grpo.records.files import as_json, rollout_files
from hybrid_grpo.records.json_lines import last_lines, open_file, parse_step
from hybrid_grpo.records.metrics.catalogue import TIME_METRICS, TOKEN_METRICS, find
from hybrid_grpo.records.metrics.charts import is_noisy
from hybrid_grpo.watch.metrics_file import MetricsFile, Row, last_row
from hybrid_grpo.watch.rollouts import number
from hybrid_grpo.watch.table import Column, Table
from hybrid_grpo.watch.trace_file import TraceFile

AXES = ("step", "tokens", "hours")
"""What curves are drawn over: steps, tokens sampled (in a supervised run: trained on) so far, hours of work so far."""
_TELLING = (
    *("eval/[^/]+/accuracy", "reward/mean", "sft/loss", "reward_model/heldout_accuracy", "reward_model/loss"),
    *("completion/length_mean", "policy/entropy", "throughput/generated_tokens_per_s"),
)
"""Numbers by which runs are compared at a glance."""
_RECENT = 10
"""Values that the first and the newest number of a noisy metric are averaged over."""
_MOST_ALARMS = 1000
_CONFIG_BYTES = 2**20
_DEEPEST, _LONGEST_NAME, _LONGEST_VALUE, _MOST_DIFFERING = 6, 300, 1000, 500
"""Of settings that are compared."""
_BEST: dict[str, Callable[[Column], Any]] = {"accuracy": np.argmax, "/loss": np.argmin}
"""Where the best value is, by how the names of metrics end."""


_VERSIONS = itertools.count(time.time_ns() // 10**6)
"""Never the same again, so that a page also sees that a server or a folder is another one."""


class WatchedRun:
    """A run's folder. Nothing is read before it is asked for, and numbers only as far as `refresh` has come."""

    def __init__(self, name: str, folder: Path) -> None:
        """`name` is how the page calls the run: unique among those that are watched."""
        self.name, self.folder = name, folder
        self.lock = threading.Lock()
        """Held by who reads numbers or details."""
        self._config: tuple[int, str, dict[str, Any]] = (0, "", {})
        self._rollouts: tuple[int, dict[int, Path]] = (0, {})
        self._tail: tuple[int, Row | None] = (-1, None)
        self._alarms: tuple[int, list[AlarmRecord]] = (-1, [])
        self._file = MetricsFile(folder / "metrics.jsonl")
        self.trace = TraceFile(folder / "details.jsonl")
        self.version = next(_VERSIONS)
        """Another one whenever the numbers have changed."""
        self._summary: tuple[int, dict[str, Any]] = (-1, {})

    def refresh(self, seconds: float) -> None:
        """Read what the run has written since, for about so many seconds at most."""
        if self._file.read(seconds):
            self.version = next(_VERSIONS)

    @property
    def table(self) -> Table:
        """The numbers; while a large file is being read, lines from all over it."""
        return self._file.shown

    @property
    def share_read(self) -> float:
        """Share of the numbers that has been read."""
        return self._file.share_read

    @property
    def damaged(self) -> int:
        """Lines of metrics.jsonl that could not be read."""
        return self._file.damaged

    @property
    def config_text(self) -> str:
        """config.yaml as it stands, of a far too large one the beginning; empty where there is none."""
        return self._read_config()[1]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by section; empty where config.yaml is missing or damaged."""
        return self._read_config()[2]

    def _section(self, name: str) -> dict[str, Any]:
        section = self.settings.get(name)
        return section if isinstance(section, dict) else {}

    def _read_config(self) -> tuple[int, str, dict[str, Any]]:
        path = self.folder / "config.yaml"
        changed = _changed(path)
        if self._config[0] != changed:
            text, loaded = _beginning(path), None
            with suppress(yaml.YAMLError, ValueError):
                loaded = load_yaml(text)
            self._config = changed, text, loaded if isinstance(loaded, dict) else {}
        return self._config

    def rollouts(self) -> dict[int, Path]:
        """The files of saved completions by step, in their order."""
        folder = self.folder / "rollouts"
        changed = _changed(folder)
        if self._rollouts[0] != changed:
            self._rollouts = changed, {step: path for step, path in rollout_files(folder).items() if step < 2**53}
        return self._rollouts[1]

    def axis(self, name: str) -> Column:
        """[rows]: where each row of the table stands on an axis of `AXES`."""
        steps = self.table.column("step")
        if name == "step":
            return steps
        # Of a glimpse, each row stands for all steps since the row before.
        gaps = np.diff(steps, prepend=steps[:1] - 1)
        parts = np.nan_to_num(
            [self.table.column(part) for part in (TIME_METRICS if name == "hours" else TOKEN_METRICS)]
        )
        total: Column = np.cumsum(parts.sum(axis=0) * gaps)
        return total / 3600 if name == "hours" else total

    def alarms(self) -> list[AlarmRecord]:
        """What the run has said of itself, in its words."""
        path = self.folder / ALARMS_FILE
        changed = _changed(path)
        if self._alarms[0] != changed:
            found = [alarm for line in last_lines(path) if (alarm := _alarm(line)) is not None]
            self._alarms = changed, found[-_MOST_ALARMS:]
        return self._alarms[1]

    def outline(self) -> dict[str, Any]:
        """What the list of runs says, without reading the numbers: progress, and when the run was last heard of."""
        path = self.folder / "metrics.jsonl"
        changed = _changed(path)
        if self._tail[0] != changed:
            self._tail = changed, last_row(path)
        row, steps = self._tail[1] or {}, self._section("run").get("steps")
        return {
            "run": self.name,
            "folder": str(self.folder),
            "step": row.get("step"),
            "steps": steps if type(steps) is int else None,
            "age": time.time() - changed / 1e9 if changed else None,
            "step_seconds": number(row.get("time/step_s")),
        }

    def summary(self) -> dict[str, Any]:
        """Numbers by which runs are compared: the first and the newest ones (no first one where they overlap), and of
        accuracies and losses the best with its step."""
        if self._summary[0] != self.version:
            self._summary = self.version, self._summarize()
        return self._summary[1]

    def _summarize(self) -> dict[str, Any]:
        table, numbers = self.table, []
        steps = table.column("step")
        for pattern in _TELLING:
            for name in filter(re.compile(pattern).fullmatch, table.names):
                values = table.column(name)
                at = np.flatnonzero(~np.isnan(values))
                metric = find(name)
                if not at.size or metric is None:
                    continue
                width = _RECENT if is_noisy(metric) else 1
                early, recent = values[at[:width]], values[at[-width:]]
                pick = next((pick for end, pick in _BEST.items() if name.endswith(end)), None)
                best = pick(values[at]) if pick else None
                numbers.append(
                    {
                        "name": name,
                        "meaning": metric.meaning,
                        "first": float(early.mean()) if at.size >= 2 * width else None,
                        "value": float(recent.mean()),
                        "best": None if best is None else float(values[at[best]]),
                        "best_step": None if best is None else int(steps[at[best]]),
                    }
                )
        hours = self.axis("hours")
        seconds = [second for second in table.column("time/step_s")[-20:].tolist() if not math.isnan(second)]
        return {
            "run": self.name,
            "numbers": numbers,
            "hours": float(hours[-1]) if hours.size else 0.0,
            "step_seconds": statistics.median(seconds) if seconds else None,
        }


def _alarm(line: bytes) -> AlarmRecord | None:
    """The alarm of a line; earlier versions wrote the step and the message only."""
    found = parse_step(line) or {"step": None}
    step, name, message = found["step"], found.get("alarm", ""), found.get("message")
    since = found.get("since", step)
    if type(since) is not int or not isinstance(name, str) or not isinstance(message, str):
        return None
    return AlarmRecord(step, name[:_LONGEST_NAME], since, message[:_LONGEST_VALUE])


def flat(settings: dict[str, Any], prefix: str = "", levels: int = _DEEPEST) -> dict[str, str]:
    """Settings by their dotted names, each value as JSON, text without quotes; of long ones the beginning."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        dotted = f"{prefix}{name}"[:_LONGEST_NAME]
        if isinstance(value, dict) and value and levels:
            found |= flat(value, f"{dotted}.", levels - 1)
        else:
            found[dotted] = (value if isinstance(value, str) else as_json(value))[:_LONGEST_VALUE]
    return found


def differing(runs: list[WatchedRun]) -> list[dict[str, Any]]:
    """Settings that are not the same in all runs, other than where the run is: name, and the values by run. Where there
    are far too many, the last entry says how many are left out."""
    settings = {run.name: flat(run.settings) for run in runs}
    known = dict.fromkeys(name for values in settings.values() for name in values)
    # Those that all runs have come first.
    names = sorted(known, key=lambda name: any(name not in values for values in settings.values()))
    unlike = [
        name
        for name in names
        if name not in ("run.name", "run.dir") and len({values.get(name) for values in settings.values()}) > 1
    ]
    found: list[dict[str, Any]] = [
        {"name": name, "values": {run: values.get(name) for run, values in settings.items()}}
        for name in unlike[:_MOST_DIFFERING]
    ]
    left_out = len(unlike) - len(found)
    return found + ([{"name": f"{left_out} more are left out", "values": {}}] if left_out else [])


def _beginning(path: Path) -> str:
    """The text of a file; of a far too large one the beginning, and a line that says so."""
    try:
        with open_file(path) as file:
            content = file.read(_CONFIG_BYTES + 1)
    except OSError:
        return ""
    text = content[:_CONFIG_BYTES].decode(errors="replace")
    return text if len(content) <= _CONFIG_BYTES else f"{text}\n# The file is larger: the rest is left out."


def _changed(path: Path) -> int:
    """When a file or folder was last written, in nanoseconds; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
