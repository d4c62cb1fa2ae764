"""The meter, which reduces the metrics of a step over micro-batches and ranks as the catalogue says.

`sinks.py` writes them.
"""

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import record_function

from hybrid_grpo.distributed import ranks
from hybrid_grpo.records.metrics.catalogue import FIXED, PATTERNS, Reduction, describe

Span = tuple[str, float, float]
"""A stage of a step: its name, its start and its end, the latter two in seconds of `time.perf_counter`."""


class Meter:
    """Collects the metrics of one step on this rank and reduces them over all ranks.

    The layout of the reduction is fixed at the start, by the catalogue and the names of reward functions, evaluation
    sets, sources, tools and features, which are the same on every rank. So a rank may leave out a metric that the
    others have, and no set of `add` calls can misalign or hang the collectives.
    """

    def __init__(
        self,
        rewards: Sequence[str] = (),
        evals: Sequence[str] = (),
        device: torch.device | str = "cpu",
        sources: Sequence[str] = (),
        samples: int = 1,
        tools: Sequence[str] = (),
        features: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`device` is where the collectives run (with NCCL, the rank's GPU). `samples` is the highest number of
        completions per prompt in an evaluation set. `features` has values for placeholders in features' metrics."""
        ks = [str(k) for k in range(2, samples + 1)]
        names = {
            "<function>": rewards,
            "<set>": evals,
            "<source>": sources,
            "<k>": ks,
            "<tool>": tools,
            **(features or {}),
        }
        self._reductions = {name: metric.reduction for name, metric in FIXED.items()}
        for _, metric in PATTERNS:
            spelled = [metric.name]
            for placeholder in re.findall(r"<\w+>", metric.name):
                spelled = [name.replace(placeholder, n) for name in spelled for n in names.get(placeholder, ())]
            self._reductions |= dict.fromkeys(spelled, metric.reduction)
        self._device = torch.device(device)
        self.spans: list[Span] = []
        """The stages of the step on this rank, in the order in which they ended."""
        self._added: dict[str, list[tuple[float | Tensor, float | Tensor]]] = {}

    def add(self, name: str, value: float | Tensor, count: float | Tensor = 1) -> None:
        """Add a number or a 0-d tensor, which is read only at `reduce`, so that nothing waits for the GPU here.

        `count` is the weight of the value in a mean: the number of items that it averages. A value of count 0 is left
        out, so the mean of nothing (NaN) may be added.
        """
        if name not in self._reductions:
            describe(name)
            raise KeyError(f"{name} has a name in it that this meter was not made for")
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

    def reduced(self, numbers: Mapping[str, tuple[float | Tensor, float | Tensor]]) -> dict[str, float]:
        """Reduce only `numbers`, as `reduce` would; what was added to the meter stays there. Collective."""
        added, spans, self._added = self._added, self.spans, {}
        self.update(numbers)
        values = self.reduce()
        self._added, self.spans = added, spans
        return values

    def reduce(self) -> dict[str, float]:
        """Return the step's metrics that any rank added, the same on all ranks; empty the meter. Two collectives."""
        sums = torch.zeros(len(self._reductions), 2, dtype=torch.float64)
        highs = torch.full_like(sums, -math.inf)
        read = self._read()
        for row, (name, reduction) in enumerate(self._reductions.items()):
            if added := read.get(name):
                sums[row] = torch.tensor(_total(added, reduction), dtype=torch.float64)
                highs[row] = torch.tensor(_extremes(added, reduction), dtype=torch.float64)
        self._added, self.spans = {}, []
        sums = ranks.all_reduce(sums.to(self._device), "sum").cpu()
        highs = ranks.all_reduce(highs.to(self._device), "max").cpu()
        values = {}
        rows = zip(self._reductions.items(), sums.tolist(), highs.tolist(), strict=True)
        for (name, reduction), (total, count), (high, minus_low) in rows:
            if not count:
                continue
            if reduction in ("sum", "mean", "rank_mean"):
                values[name] = total if reduction == "sum" else total / count
            elif math.isnan(total):
                values[name] = math.nan
            else:
                same = reduction != "same" or high == -minus_low
                assert same, f"{name} differs between ranks: {-minus_low} to {high}"
                values[name] = -minus_low if reduction == "min" else high
        return values


def _total(added: list[tuple[float, float]], reduction: Reduction) -> tuple[float, float]:
    """Return this rank's total and count for the sums over ranks. An extreme's total is NaN if a value is, else 0."""
    if reduction == "mean":
        return sum(value * count for value, count in added), sum(count for _, count in added)
    if reduction in ("sum", "rank_mean"):
        return sum(value for value, _ in added), 1
    return (math.nan if any(math.isnan(value) for value, _ in added) else 0.0), 1


def _extremes(added: list[tuple[float, float]], reduction: Reduction) -> tuple[float, float]:
    """Return this rank's input to the maximum over ranks: the highest value, and minus the lowest one. NaN is left out,
    since collectives do not compare it in a defined way; `_total` passes it on."""
    values = [value for value, _ in (added[-1:] if reduction == "same" else added) if not math.isnan(value)]
    return (max(values), -min(values)) if values else (-math.inf, -math.inf)
