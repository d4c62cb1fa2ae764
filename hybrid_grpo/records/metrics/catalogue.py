"""The catalogue of metrics, read from metrics.yaml: the name, meaning, unit and reduction of every metric of a run.

This module does not import torch, so that programs that only read a run start quickly.
"""

import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from hybrid_grpo.config.features import feature_folders

Reduction = Literal["mean", "sum", "max", "min", "same", "rank_mean"]
"""How the values added during a step become one number; metrics.yaml explains each."""

TIME_METRICS = ("time/step_s", "time/eval_s", "time/checkpoint_s")
TOKEN_METRICS = ("completion/sampled_tokens", "sft/tokens")
"""The running sums of `TIME_METRICS` and `TOKEN_METRICS` are the axes of hours and of tokens."""


@dataclass(frozen=True)
class Metric:
    name: str
    meaning: str
    reduction: Reduction
    unit: str = ""
    """Empty for a pure number or a fraction."""
    better: Literal["higher", "lower", ""] = ""
    """Whether higher or lower values are better; empty if neither is."""


def read_with_features(own: Path) -> list[dict[str, Any]]:
    """Return the contents of a YAML file and of the files with the same name in feature folders."""
    files = [own, *(folder / own.name for folder in feature_folders())]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in Python it takes ten times as long
    return [yaml.load(file.read_text(encoding="utf-8"), loader) for file in files if file.exists()]


_ENTRIES = {
    name: entry
    for entries in read_with_features(Path(__file__).with_name("metrics.yaml"))
    for name, entry in entries.items()
}
CATALOGUE = tuple(Metric(name, **entry) for name, entry in _ENTRIES.items())
FIXED = {metric.name: metric for metric in CATALOGUE if "<" not in metric.name}
PATTERNS = [(re.compile(re.sub(r"<\w+>", "[^/]+", metric.name)), metric) for metric in CATALOGUE if "<" in metric.name]


def find(name: str) -> Metric | None:
    """Return the catalogue's entry for `name`, renamed to `name` if it is a pattern; None if there is no entry."""
    if name in FIXED:
        return FIXED[name]
    return next((replace(metric, name=name) for pattern, metric in PATTERNS if pattern.fullmatch(name)), None)


@functools.lru_cache(maxsize=1 << 14)
def describe(name: str) -> Metric:
    """Like `find`, but raise KeyError if there is no entry."""
    metric = find(name)
    if metric is None:
        raise KeyError(f"{name} is not in the catalogue of metrics")
    return metric


def duration(seconds: float) -> str:
    """Return a duration as readable text: under 1 ms, 12 ms, 4.2 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "under 1 ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    return f"{minutes} min {round(seconds) % 60:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
