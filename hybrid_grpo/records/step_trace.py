"""The trace of a step shows more than its metrics: its groups, distributions of its numbers, and where its time went.

Every rank collects its part during the step; `sinks.py` gathers the parts once per step and writes them to
details.jsonl. docs/watch.md explains the format.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_grpo.config import LogConfig
from hybrid_grpo.data.batch import Rollout, Scores, TrainBatch
from hybrid_grpo.distributed.ranks import world_size
from hybrid_grpo.generation import Timeline
from hybrid_grpo.records.metrics.meter import Span

BUCKETS = 20
"""Maximum number of buckets in a histogram."""
_FINE = 1024
"""Number of fine buckets in which tokens are counted before `of_counts` merges the buckets into a histogram. The counts
can be added up over micro-batches and ranks before the lowest and highest values are known."""
_TOPS = {"entropy": 16.0, "ratio": 4.0}
"""Upper end of the fine buckets of each quantity; the last bucket also holds all larger values."""
_MOMENTS = 512
"""Maximum number of moments of decoding in a step's trace, for all ranks together; a rank's share is at least 8."""


class StepTrace:
    """Collects this rank's part of each step's trace, unless `log.details` is off or `config` is None.

    Args:
        config: settings that decide whether traces are written, and how often they have histograms.
        steps: the last step of the run, whose trace has histograms like that of the first step.
    """

    def __init__(self, config: LogConfig | None = None, steps: int = 0) -> None:
        self._on, self._every, self._steps = False, 0, steps
        if config is not None:
            self._on, self._every = config.details, config.histograms_every
        self._has_histograms = False
        self._timelines: list[Timeline] = []
        self._counts: dict[str, Tensor] = {}

    def begin(self, step: int) -> None:
        due = self._every > 0 and (step % self._every == 0 or step in (1, self._steps))
        self._has_histograms = self._on and due
        self._timelines, self._counts = [], {}

    def decoded(self, timeline: Timeline | None) -> None:
        """Add the timeline of a rollout, which is None if nothing was decoded."""
        if timeline is not None:
            self._timelines.append(timeline)

    def learned(self, batch: TrainBatch, logp_bT: Tensor, entropy_bT: Tensor) -> None:
        """Count the tokens of a micro-batch by entropy and, if the policy may have changed since it sampled, by
        probability ratio. This does not wait for the GPU."""
        if not self._has_histograms:
            return
        self._count("entropy", entropy_bT, batch.own_bT)
        if batch.old_logp_bT is not None:
            self._count("ratio", (logp_bT.detach() - batch.old_logp_bT).exp(), batch.own_bT)

    def _count(self, name: str, value_bT: Tensor, real_bT: Tensor) -> None:
        top = _TOPS[name]
        # Other tokens become -1, which is in no bucket; filtering them out would wait for the device.
        kept_bT = torch.where(real_bT, value_bT.detach().float().clamp(0.0, top), -1.0).nan_to_num(-1.0)
        count_K = torch.histc(kept_bT, _FINE, 0.0, top)
        self._counts[name] = self._counts[name] + count_K if name in self._counts else count_K

    def own(self, spans: Sequence[Span], taken: tuple[Rollout, Scores, Tensor] | None) -> dict[str, Any] | None:
        """Return this rank's part of the ended step's trace, for `trace_line`; None if nothing is collected. `spans`
        are the times of the step's stages, and `taken` is `Stage.last_rollout`."""
        start = next((begin for name, begin, _ in spans if name == "step"), None)
        if not self._on or start is None:
            return None
        within = sorted((begin, end, name) for name, begin, end in spans if name != "step" and begin >= start)
        part: dict[str, Any] = {
            "stages": [[name, _time(begin - start), _time(end - start)] for begin, end, name in within]
        }
        part["decoder"] = (
            _moments(self._timelines, start, max(8, _MOMENTS // world_size())) if self._timelines else None
        )
        if taken is not None:
            rollout, scores, advantage_B = taken
            part["prompts"] = _groups(rollout, scores)
            if self._has_histograms:
                part["values"] = {
                    "reward": scores.reward_B.numpy(),
                    "length": np.array(rollout.lengths),
                    "advantage": advantage_B.cpu().numpy(),
                }
                part["counts"] = {name: count_K.cpu().numpy() for name, count_K in self._counts.items()}
        return part


def trace_line(step: int, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a step's line of details.jsonl, made from the parts of all ranks."""
    line: dict[str, Any] = {"step": step}
    if "prompts" in parts[0]:
        line["prompts"] = list(chain.from_iterable(part["prompts"] for part in parts))
    if "values" in parts[0]:
        values = {name: np.concatenate([part["values"][name] for part in parts]) for name in parts[0]["values"]}
        found = {name: histogram(of_rows) for name, of_rows in values.items()}
        # A rank that learned nothing has counted nothing.
        names = dict.fromkeys(chain.from_iterable(part["counts"] for part in parts))
        for name in names:
            count_K = np.sum([part["counts"][name] for part in parts if name in part["counts"]], axis=0)
            found[name] = of_counts(count_K, _TOPS[name])
        line["histograms"] = {name: drawn for name, drawn in found.items() if drawn is not None}
    line["stages"] = [part["stages"] for part in parts]
    if any(part["decoder"] for part in parts):
        line["decoder"] = [part["decoder"] for part in parts]
    return line


def histogram(values: NDArray[Any]) -> dict[str, list[Any]] | None:
    """Return the edges and counts of `BUCKETS` equally wide buckets from the lowest to the highest value, or of a
    single bucket if all values are equal; None if there are no values. NaN is left out."""
    values = values[~np.isnan(values)]
    if not values.size:
        return None
    counts, edges = np.histogram(values, BUCKETS if np.ptp(values) else 1)
    return {"edges": [_short(edge) for edge in edges.tolist()], "counts": counts.tolist()}


def of_counts(count_K: NDArray[Any], top: float) -> dict[str, list[Any]] | None:
    """Merge neighboring fine buckets between 0 and `top` into at most `BUCKETS` buckets and return their edges and
    counts; None if all are empty. Empty fine buckets at either end are left out."""
    used = np.flatnonzero(count_K)
    if not used.size:
        return None
    first, last = int(used[0]), int(used[-1])
    wide = -(-(last + 1 - first) // BUCKETS)
    starts = np.arange(first, last + 1, wide)
    counts = np.add.reduceat(count_K[: last + 1], starts)
    edges = np.append(starts, starts[-1] + wide) * (top / len(count_K))
    return {"edges": [_short(edge) for edge in edges.tolist()], "counts": counts.astype(int).tolist()}


def _groups(rollout: Rollout, scores: Scores) -> list[list[Any]]:
    """Return for each group its prompt's row, the mean and standard deviation of the rewards of completions that the
    policy sampled, and, if the prompts come from a mixture, their source."""
    sampled_B = np.array([not completion.writer for completion in rollout.completions])
    reward_PG = np.where(sampled_B, scores.reward_B.numpy(), np.nan).reshape(-1, rollout.num_generations)
    count_P = (~np.isnan(reward_PG)).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_P = np.nansum(reward_PG, 1) / count_P
        variance_P = np.nansum((reward_PG - mean_P[:, None]) ** 2, 1) / np.where(count_P > 1, count_P - 1, np.nan)
    numbers = zip(rollout.prompts, mean_P.tolist(), np.sqrt(variance_P).tolist(), strict=True)
    return [
        [prompt.id, _short(mean), _short(spread), *([prompt.source] if prompt.source else [])]
        for prompt, mean, spread in numbers
    ]


def _moments(timelines: list[Timeline], start: float, most: int) -> dict[str, Any]:
    """Join the timelines of a step's rollouts, thinned to at most `most` moments, which include the last one."""
    at = list(chain.from_iterable(timeline.at for timeline in timelines))
    apart = -(-len(at) // most)
    kept = list(range(len(at)))[::-apart][::-1]
    line: dict[str, Any] = {"t": [_time(at[moment] - start) for moment in kept]}
    for name in ("decoding", "waiting", "queued"):
        values = list(chain.from_iterable(getattr(timeline, name) for timeline in timelines))
        line[name] = [values[moment] for moment in kept]
    line["slots"] = max(timeline.slots for timeline in timelines)
    line["pages_used_max"] = _short(max(timeline.pages_used_max for timeline in timelines))
    return line


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _time(seconds: float) -> float:
    return round(seconds, 4)
