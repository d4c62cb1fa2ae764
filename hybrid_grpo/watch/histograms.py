"""Keeps the histograms of a run's steps, and shows their change over time on common edges."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST, _MOST_COUNTS = 1000, 2**21
"""Maximum number of steps, and of counts, that are kept; beyond them, every other step is dropped."""
BUCKETS = 32
_MOST_NAMES, _LONGEST_NAME, _MOST_BUCKETS = 32, 300, 512
"""Limits of names and buckets; a run writes fewer."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class OverTime:
    """Distributions of a number at several steps."""

    steps: list[int]
    edges: Floats
    """[BUCKETS + 1]"""
    shares: Floats
    """[BUCKETS, steps]: share of a step's values in each bucket; values beyond the edges are in no bucket."""


class Histograms:
    """Histograms by step and name."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, tuple[Floats, Floats]]] = {}
        self._names: set[str] = set()
        self._stride, self._seen, self._counts = 1, 0, 0

    def append(self, step: int, histograms: Any) -> None:
        """Add a step's histograms from details.jsonl: `edges` and `counts` by name. Skip malformed histograms."""
        if not isinstance(histograms, dict):
            return
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        named = ((name, value) for name, value in histograms.items() if self._is_known(name))
        found = {name: pair for name, value in named if (pair := _pair(value)) is not None}
        if not found:
            return
        self._steps[step] = found
        self._counts += _size(found)
        if len(self._steps) > MOST or self._counts > _MOST_COUNTS:
            self._stride *= 2
            self._steps = dict(list(self._steps.items())[::2])
            self._counts = sum(map(_size, self._steps.values()))

    def _is_known(self, name: str) -> bool:
        if len(self._names) < _MOST_NAMES and len(name) <= _LONGEST_NAME:
            self._names.add(name)
        return name in self._names

    def near(self, step: int) -> tuple[int, dict[str, dict[str, list[float]]]] | None:
        """Return the newest kept step that is not after `step`, and its histograms: `edges` and `counts` by name."""
        at = max((kept for kept in self._steps if kept <= step), default=None)
        if at is None:
            return None
        found = self._steps[at].items()
        return at, {name: {"edges": edges.tolist(), "counts": counts.tolist()} for name, (edges, counts) in found}

    def over_time(self, columns: int) -> dict[str, OverTime]:
        """Return distributions by name, each at up to `columns` steps from first to newest; a name needs two steps."""
        names = dict.fromkeys(name for found in self._steps.values() for name in found)
        answer = {}
        for name in names:
            steps = [step for step, found in self._steps.items() if name in found]
            kept = sorted({round(at) for at in np.linspace(0, len(steps) - 1, min(columns, len(steps)))})
            if len(kept) > 1:
                chosen = [steps[at] for at in kept]
                answer[name] = _common(chosen, [self._steps[step][name] for step in chosen])
        return answer


def _size(histograms: dict[str, tuple[Floats, Floats]]) -> int:
    return sum(len(counts) for _, counts in histograms.values())


def _pair(value: Any) -> tuple[Floats, Floats] | None:
    try:
        edges, counts = (np.array(value[part], np.float64) for part in ("edges", "counts"))
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    whole = edges.ndim == counts.ndim == 1 and len(edges) == len(counts) + 1 > 1
    if (
        not whole
        or len(counts) > _MOST_BUCKETS
        or not (np.abs(edges) < 1e30).all()
        or (np.diff(edges) < 0).any()
        or not 0 < counts.sum() < np.inf
    ):
        return None
    return edges, counts


def _common(steps: list[int], pairs: list[tuple[Floats, Floats]]) -> OverTime:
    # Ignores the few steps that reach farthest: their range would squeeze all others into one bucket.
    low = float(np.quantile([edges[0] for edges, _ in pairs], 0.02))
    high = float(np.quantile([edges[-1] for edges, _ in pairs], 0.98))
    edges = np.linspace(low, high if high > low else low + 1, BUCKETS + 1)
    shares = []
    for own, counts in pairs:
        below = np.concatenate([[0.0], np.cumsum(counts / counts.sum())])
        # A step whose values are all equal is a jump.
        shares.append(
            np.diff(np.interp(edges, own, below)) if own[-1] > own[0] else np.histogram(own[:1], edges)[0].astype(float)
        )
    return OverTime(steps, edges, np.array(shares).T)
