"""The meter, which reduces the metrics of a step over micro-batches and ranks as the catalogue says.

`sinks.py` writes them.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from hybrid_grpo.distributed import ranks
from hybrid_grpo.records.metrics.catalogue import Reduction, describe

Span = tuple[str, float, float]
"""A stage of a step: its name, its start and its end, the latter two in seconds of `time.perf_counter`."""


class Meter:
    """Collects the metrics of one step on this rank and reduces them over all ranks. A rank may leave out a metric that
    the others have. `device` is the one whose work stages are timed."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self.spans: list[Span] = []
        """The stages of the step on this rank, in the order in which they ended."""
        self._added: dict[str, list[tuple[float | Tensor, float | Tensor]]] = {}

    def add(self, name: str, value: float | Tensor, count: float | Tensor = 1) -> None:
        """Add a number or a 0-d tensor, which is read only at `reduce`, so that nothing waits for the GPU here.

        `count` is the weight of the value in a mean: the number of items that it averages. A value of count 0 is left
        out, so the mean of nothing (NaN) may be added. Raises KeyError for a name that is not in the catalogue.
        """
        describe(name)
        if isinstance(count, Tensor) or count:
            kept = value.detach().clone() if isinstance(value, Tensor) else value
            self._added.setdefault(name, []).append((kept, count))

    def update(self, numbers: Mapping[str, tuple[float | Tensor, float | Tensor]]) -> None:
        """Add the metrics of a stage; `numbers` has the value and count of each, by name."""
        for name, (value, count) in numbers.items():
            self.add(name, value, count)

    def total(self, name: str) -> float:
        """Return the sum of the values that this rank added under a name since the last `reduce`."""
        return sum(float(value) for value, _ in self._added.get(name, ()))

    def mean(self, name: str) -> float:
        """Return the weighted mean of the numbers that this rank added under a name since the last `reduce`, or 0."""
        pairs = self._added.get(name, ())
        weight = sum(float(count) for _, count in pairs)
        return sum(float(value) * float(count) for value, count in pairs) / weight if weight else 0.0

    def add_spans(self, spans: Iterable[Span]) -> None:
        """Add stages of the step that were timed elsewhere."""
        self.spans.extend(spans)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time the `with` block as a stage of the step, in seconds. Waits for the GPU before and after the block."""
        stage = name.removeprefix("time/").removesuffix("_s")
        self._synchronize()
        start = time.perf_counter()
        with record_function(f"stage/{stage}"):
            yield
        self._synchronize()
        end = time.perf_counter()
        self.add(name, end - start)
        self.add_spans([(stage, start, end)])

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _read(self) -> dict[str, list[tuple[float, float]]]:
        """Return values and counts by name, without values of count 0. A device's tensors are copied all at once."""
        tensors = [x for added in self._added.values() for pair in added for x in pair if isinstance(x, Tensor)]
        numbers: dict[int, float] = {}
        for device in {tensor.device for tensor in tensors}:
            here = [tensor for tensor in tensors if tensor.device == device]
            numbers.update(zip(map(id, here), torch.stack([x.double() for x in here]).tolist(), strict=True))
        read = {
            name: [(numbers.get(id(value), value), numbers.get(id(count), count)) for value, count in added]
            for name, added in self._added.items()
        }
        return {name: [(float(value), float(count)) for value, count in added if count] for name, added in read.items()}

    def reduce(self) -> dict[str, float]:
        """Return the step's metrics that any rank added, the same on all ranks; empty the meter. Collective."""
        own = {name: _of_rank(added, describe(name).reduction) for name, added in self._read().items() if added}
        self._added, self.spans = {}, []
        parts: dict[str, list[tuple[float, float]]] = {}
        for of_rank in ranks.all_gather_objects(own):
            for name, part in of_rank.items():
                parts.setdefault(name, []).append(part)
        return {name: _of_all(name, of_ranks) for name, of_ranks in parts.items()}


# numpy's extremes are NaN if a value is.
_JOINED: dict[Reduction, Callable[[Sequence[float]], Any]] = {
    "mean": sum, "rank_mean": sum, "sum": sum, "max": np.max, "min": np.min, "same": np.max,
}  # fmt: skip


def _of_rank(added: list[tuple[float, float]], reduction: Reduction) -> tuple[float, float]:
    """Return this rank's part of a metric, and its weight in a mean."""
    if reduction == "mean":
        return sum(value * count for value, count in added), sum(count for _, count in added)
    values = [value for value, _ in (added[-1:] if reduction == "same" else added)]
    return float(_JOINED[reduction](values)), 1.0


def _of_all(name: str, of_ranks: list[tuple[float, float]]) -> float:
    """Return a metric, given the parts and weights of the ranks that have it."""
    reduction, parts = describe(name).reduction, [part for part, _ in of_ranks]
    total = float(_JOINED[reduction](parts))
    same = reduction != "same" or math.isnan(total) or min(parts) == total
    assert same, f"{name} differs between ranks: {min(parts)} to {total}"
    return total / sum(weight for _, weight in of_ranks) if reduction in ("mean", "rank_mean") else total


def stages_of(spans: Sequence[Span]) -> list[Any] | None:
    """Return the name, begin and end of this rank's stages, in seconds since the step began; None if it has none."""
    start = next((begin for name, begin, _ in spans if name == "step"), None)
    if start is None:
        return None
    within = sorted((begin, end, name) for name, begin, end in spans if name != "step" and begin >= start)
    return [[name, round(begin - start, 4), round(end - start, 4)] for begin, end, name in within]
