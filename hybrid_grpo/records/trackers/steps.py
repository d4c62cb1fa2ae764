"""Reads the steps that wandb shows from a run's folder while its files grow."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_grpo.records.alarm_records import ALARMS_FILE
from hybrid_grpo.records.files import rollout_files
from hybrid_grpo.records.json_lines import parse_step, read_jsonl
from hybrid_grpo.records.metrics.catalogue import TIME_METRICS, TOKEN_METRICS
from hybrid_grpo.records.thumbnails import files
from hybrid_grpo.records.trackers.growing_files import GrowingFile

STEP, TOKENS, HOURS = AXES = ("progress/step", "progress/tokens", "progress/hours")
"""The x axes of curves: the step, the completion tokens sampled so far (`sft`: target tokens), and the hours of
training, evaluation and checkpoints."""

_EACH, _OF_ALARM = 4, 32
"""Number of samples of each kind, and number of extra samples from a step with an alarm."""
_PICTURES, _CAPTION = 4, 200
"""Most pictures that are shown of a step, and letters of a completion in a caption."""

Row = dict[str, Any]
"""A line of rollouts/step_*.jsonl: a completion with its rewards."""


@dataclass(frozen=True)
class TrackedStep:
    """One step as wandb shows it."""

    step: int
    values: dict[str, float]
    """The metrics and the AXES by name; null in metrics.jsonl becomes NaN."""
    samples: list[tuple[str, Row]] = field(default_factory=list)
    """Completions worth reading, each with the reason: best, worst, surprising, alarm."""
    distributions: dict[str, list[float]] = field(default_factory=dict)
    """Rewards, lengths in tokens and advantages of all completions; empty if no histogram is due."""
    alarms: list[str] = field(default_factory=list)
    pictures: list[tuple[Path, str]] = field(default_factory=list)
    """Copies of pictures in the prompts of some samples, each with a caption; none if no histogram is due."""


class TrackedSteps:
    """Yields the steps of a run after the step `done`, each once, as its folder grows."""

    def __init__(self, folder: Path, done: int, histograms_every: int) -> None:
        """`histograms_every` is the number of steps between histograms; 0 means no histograms."""
        self._rollouts, self._done, self._every = folder / "rollouts", done, histograms_every
        self._numbers = GrowingFile(folder / "metrics.jsonl", self._take_numbers, lambda: None)
        self._alarms = GrowingFile(folder / ALARMS_FILE, self._take_alarm, lambda: None)
        self._unseen: list[tuple[int, dict[str, float]]] = []
        self._messages: dict[int, list[str]] = defaultdict(list)
        self._tokens = self._seconds = 0.0
        self._last, self._drawn = done, -1
        """The last step that was read, and the last one with histograms."""

    def new(self) -> Iterator[TrackedStep]:
        """Yield the steps whose metrics were written since the last call."""
        self._numbers.read(math.inf)
        unseen, self._unseen = self._unseen, []
        for step, values in unseen:
            yield self._step(step, values)

    def unfinished(self) -> Iterator[TrackedStep]:
        """Yield a last step that could not be finished: it has rollouts but no metrics."""
        for step in rollout_files(self._rollouts):
            if step > self._last:
                yield self._step(step, {STEP: step})

    def _take_numbers(self, line: bytes) -> None:
        row = parse_step(line) or {}
        step = row.pop("step", -1)
        values = {name: math.nan if value is None else value for name, value in row.items()}
        self._tokens += sum(values.get(name, 0.0) for name in TOKEN_METRICS)
        self._seconds += sum(values.get(name, 0.0) for name in TIME_METRICS)
        if step > self._done:
            self._last = step
            axes = dict(zip(AXES, (step, self._tokens, self._seconds / 3600), strict=True))
            self._unseen.append((step, {**values, **axes}))

    def _take_alarm(self, line: bytes) -> None:
        if (alarm := parse_step(line)) is not None and alarm["message"]:
            self._messages[alarm["step"]].append(alarm["message"])

    def _step(self, step: int, values: dict[str, float]) -> TrackedStep:
        self._alarms.read(math.inf)  # they are written before the numbers of their step
        alarms = self._messages.pop(step, [])
        rows = read_jsonl(self._rollouts / f"step_{step:06d}.jsonl")
        due = bool(self._every) and (self._drawn < 0 or step - self._drawn >= self._every)
        if rows and due:
            self._drawn = step
        samples = chosen(rows, bool(alarms))
        pictures = seen(self._rollouts.parent, samples) if due or alarms else []
        return TrackedStep(step, values, samples, distributions(rows) if due else {}, alarms, pictures)


def chosen(rows: list[Row], alarm: bool) -> list[tuple[str, Row]]:
    """Return a step's completions with the highest rewards, the lowest rewards and the largest absolute advantages (the
    surprising ones), each kind from different groups. After an alarm, also return the step's first completions."""
    scored = [row for row in rows if row["reward"] is not None]
    ranked = sorted(scored, key=lambda row: row["reward"])
    surprising = sorted(scored, key=lambda row: -abs(row["advantage"] or 0.0))
    wanted = [("best", row) for row in _of_groups(ranked[::-1])] + [("worst", row) for row in _of_groups(ranked)]
    wanted += [("surprising", row) for row in _of_groups(surprising)]
    wanted += [("alarm", row) for row in rows[:_OF_ALARM]] if alarm else []
    firsts: dict[int, tuple[str, Row]] = {}
    for why, row in wanted:  # a completion with two reasons is shown for the first one
        firsts.setdefault(id(row), (why, row))
    return list(firsts.values())


def _of_groups(rows: list[Row]) -> list[Row]:
    firsts: dict[int, Row] = {}
    for row in rows:
        firsts.setdefault(row["group"], row)
    return list(firsts.values())[:_EACH]


def seen(folder: Path, samples: list[tuple[str, Row]]) -> list[tuple[Path, str]]:
    """Return pictures that the prompts of samples in a run's folder show, each once, and what was answered."""
    found: dict[Path, str] = {}
    for why, row in samples:
        for path in files(folder, row):
            found.setdefault(path, f"{why}, reward {row['reward']}: {row['completion'][:_CAPTION]}")
    return list(found.items())[:_PICTURES]


def distributions(rows: list[Row]) -> dict[str, list[float]]:
    found = {name: [row[name] for row in rows if row[name] is not None] for name in ("reward", "length", "advantage")}
    return {f"distribution/{name}": values for name, values in found.items() if values}


def table(samples: list[tuple[str, Row]]) -> tuple[list[str], list[list[Any]]]:
    """Return a step's samples as columns and rows; chat messages become text, since a column has a single type."""
    names = ["step", "group", "prompt", "completion", "reward", "advantage", "length", "finish"]
    names += ["writer"] if any("writer" in row for _, row in samples) else []
    functions = list(samples[0][1]["rewards"]) if samples else []
    rows = [
        [why, *(row.get(name, "") for name in names), *(row["rewards"][name] for name in functions)]
        for why, row in samples
    ]
    rows = [[json.dumps(cell, ensure_ascii=False) if isinstance(cell, list) else cell for cell in row] for row in rows]
    return ["why", *names, *(f"reward/{function}" for function in functions)], rows
