"""The catalogue of metrics, and the meter that reduces them once per step.

Every number a run logs is declared here once: its name `stage/what[/reduction]`, its meaning, its unit and how
it is combined over micro-batches and ranks. Writing them down is not done here (see `sinks.py`).
"""

from __future__ import annotations

import difflib
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hybrid_grpo import distributed

Reduction = Literal["mean", "sum", "max", "min", "same", "rank_mean"]
"""How the values added during a step become one number:

    mean       weighted by their counts, over all ranks
    sum        added up, over all ranks
    max, min   over all ranks
    same       the last one added, which must be equal on all ranks
    rank_mean  added up on a rank, then averaged over the ranks that have any; so parts of a time still add up
"""


@dataclass(frozen=True)
class Metric:
    """One entry of the catalogue."""

    name: str
    meaning: str
    unit: str
    """Empty for a pure number or a fraction."""
    reduction: Reduction


# fmt: off
CATALOGUE: tuple[Metric, ...] = (
    Metric("data/epoch", "Passes over the training prompts so far.", "epochs", "same"),
    Metric("progress/completions", "Completions sampled since the run began.", "completions", "same"),

    Metric("curriculum/success_rate", "Estimated success rate of a training prompt, averaged over all of them, drawn or"
           " not: it may be compared from step to step also where difficulty decides which are drawn.", "", "same"),
    Metric("curriculum/tried_frac", "Share of the training prompts that were drawn at least once.", "", "same"),
    Metric("curriculum/skipped_frac", "Share of the training prompts that curriculum.skip_above and skip_below leave"
           " out now.", "", "same"),

    Metric("reward/mean", "Weighted sum of the reward functions, averaged over completions.", "", "mean"),
    Metric("reward/std", "Standard deviation of the reward inside a group, averaged over groups.", "", "mean"),
    Metric("reward/max", "Highest reward of a completion.", "", "max"),
    Metric("reward/min", "Lowest reward of a completion.", "", "min"),
    Metric("reward/overlong_penalty", "What is added to the reward of advantages for length, 0 or less, averaged over"
           " completions; present only with grpo.overlong_buffer.", "", "mean"),
    Metric("reward/<function>/mean", "Unweighted value of one reward function, averaged over the completions it"
           " applies to.", "", "mean"),
    Metric("reward/<function>/none_frac", "Share of completions that the function does not apply to.", "", "mean"),
    Metric("reward/<function>/failed_frac", "Share of completions that the function failed on: they have no reward and"
           " take no part in their group.", "", "mean"),
    Metric("reward/<function>/timeout_frac", "Share of completions that the function took too long for, a part of"
           " failed_frac.", "", "mean"),

    Metric("group/count", "Groups of completions sampled for the same prompt.", "groups", "sum"),
    Metric("group/zero_std_frac", "Share of groups of equal rewards (and steps): they teach nothing.", "", "mean"),
    Metric("group/all_right_frac", "Share of groups in which every completion is right.", "", "mean"),
    Metric("group/all_wrong_frac", "Share of groups in which no completion is right.", "", "mean"),

    Metric("group/informative_frac", "Share of the groups sampled in the step whose rewards are not all equal, those"
           " included that dynamic sampling did not keep.", "", "mean"),
    Metric("group/resampled", "Groups that dynamic sampling sampled beyond those of the step.", "groups", "sum"),
    Metric("group/resample_rounds", "Further rollouts of the step by dynamic sampling.", "", "same"),

    Metric("completion/sampled_tokens", "Completion tokens sampled in the step.", "tokens", "sum"),
    Metric("completion/length_mean", "Tokens of a completion, averaged.", "tokens", "mean"),
    Metric("completion/length_max", "Tokens of the longest completion.", "tokens", "max"),
    Metric("completion/clipped_frac", "Share of completions cut at the length limit.", "", "mean"),
    Metric("completion/duplicate_frac", "Share of completions equal to an earlier one of their group.", "", "mean"),

    Metric("health/reward_length_corr", "Correlation of reward and length inside a group, averaged over the groups in"
           " which both vary. Near 1 the policy is paid for length, near -1 for brevity.", "", "mean"),
    Metric("health/reward_repetition_corr", "Correlation of reward and repetition inside a group, averaged over the"
           " groups in which both vary. Above 0 the policy is paid for repeating itself.", "", "mean"),
    Metric("health/repetition_mean", "Share of a completion's runs of three tokens that repeat an earlier one, averaged"
           " over completions.", "", "mean"),
    Metric("health/best_clipped_frac", "Share of completions cut at the length limit among those with the highest"
           " reward of their group, where rewards differ. Above 0 unfinished answers are rewarded.", "", "mean"),
    Metric("health/heldout_gap", "Training reward of the step minus reward of the greedy held-out completions. One that"
           " grows says that what is learned does not carry over.", "", "same"),
    Metric("health/alarm", "1 where held-out accuracy is more than log.heldout_alarm below its best while the training"
           " reward is higher than then, else 0; at evaluations.", "", "max"),

    Metric("policy/loss", "Loss of an optimizer step, averaged over the optimizer steps; added up from the shares of"
           " the micro-batches.", "", "sum"),
    Metric("policy/entropy", "Entropy of the policy's next-token distribution, averaged over completion tokens.",
           "nats", "mean"),
    Metric("policy/kl", "Estimated KL divergence (by grpo.kl_estimator) from the policy to the reference, averaged over"
           " completion tokens; present only with a reference.", "nats", "mean"),
    Metric("policy/kl_coef", "Weight of the KL: grpo.beta, or what grpo.kl_target has made of it.", "", "same"),
    Metric("policy/clip_frac_low", "Share of tokens whose ratio is clipped from below.", "", "mean"),
    Metric("policy/clip_frac_high", "Share of tokens whose ratio is clipped from above.", "", "mean"),
    Metric("policy/ratio_max", "Largest probability ratio between the policy and the one that sampled.", "", "max"),
    Metric("policy/grad_norm", "Global gradient norm before clipping, averaged over optimizer steps.", "", "mean"),
    Metric("policy/lr", "Learning rate of the last optimizer step.", "", "same"),
    Metric("policy/skipped_steps", "Optimizer steps skipped on all ranks for a non-finite gradient, since the run"
           " began.", "steps", "same"),

    Metric("parity/logp_abs_diff_mean", "Gap between the log-probability recorded while sampling and that of the"
           " training forward, averaged over tokens.", "nats", "mean"),
    Metric("parity/logp_abs_diff_max", "Largest gap between sampler and training forward over all tokens.",
           "nats", "max"),
    Metric("parity/ratio_mean", "Probability ratio of the training forward to the sampler, of tokens (truncate) or of"
           " their completions (mask), averaged over tokens; present only with grpo.sampler_correction.", "", "mean"),
    Metric("parity/ratio_max", "Largest of these ratios.", "", "max"),
    Metric("parity/corrected_frac", "Share of tokens whose weight is truncated, or whose completion is dropped.", "",
           "mean"),
    Metric("parity/alarm", "1 where the mean gap exceeds log.parity_alarm, else 0.", "", "max"),

    Metric("sft/loss", "Cross-entropy of the target tokens, averaged.", "nats", "mean"),
    Metric("sft/tokens", "Target tokens of an optimizer step.", "tokens", "sum"),

    Metric("time/step_s", "A whole training step; evaluation and checkpoints are not part of it.", "s", "rank_mean"),
    Metric("time/generate_s", "Sampling completions.", "s", "rank_mean"),
    Metric("time/switch_s", "Going from training to generation and back.", "s", "rank_mean"),
    Metric("time/gather_s", "Gathering the sharded weights, a part of the switch.", "s", "rank_mean"),
    Metric("time/reward_s", "Reward functions at work; all of it but time/reward_wait_s is hidden behind sampling.",
           "s", "rank_mean"),
    Metric("time/reward_wait_s", "Waiting for rewards after the last completion.", "s", "rank_mean"),
    Metric("time/old_logp_s", "Log-probabilities of the policy that sampled, where they are not those recorded.", "s",
           "rank_mean"),
    Metric("time/reference_s", "Log-probabilities of the reference, and its refresh.", "s", "rank_mean"),
    Metric("time/train_s", "Forward, backward and optimizer.", "s", "rank_mean"),
    Metric("time/eval_s", "Evaluation on the held-out prompts.", "s", "rank_mean"),
    Metric("time/checkpoint_s", "Writing a checkpoint, counted with the step after it.", "s", "rank_mean"),

    Metric("throughput/generated_tokens_per_s", "Completion tokens sampled per second of generation, over all"
           " ranks.", "tokens/s", "sum"),
    Metric("throughput/trained_tokens_per_s", "Tokens of the training forwards per second of training, over all"
           " ranks.", "tokens/s", "sum"),
    Metric("throughput/completions_per_s", "Completions per second of a whole step, over all ranks.",
           "completions/s", "sum"),

    Metric("memory/peak_gb", "Peak of GPU memory during the step, on the fullest rank.", "GB", "max"),
    Metric("memory/rss_gb", "Resident host memory of the largest process.", "GB", "max"),

    Metric("eval/<set>/accuracy", "Share of held-out prompts whose greedy completion is right.", "", "mean"),
    Metric("eval/<set>/reward_mean", "Reward of the greedy completions, averaged.", "", "mean"),
    Metric("eval/<set>/failed_frac", "Share of greedy completions that a reward function failed on: they count as wrong"
           " in the accuracy.", "", "mean"),
    Metric("eval/<set>/length_mean", "Tokens of a greedy completion, averaged.", "tokens", "mean"),
    Metric("eval/<set>/clipped_frac", "Share of greedy completions cut at the length limit.", "", "mean"),
)
# fmt: on

_FIXED = {metric.name: metric for metric in CATALOGUE if "<" not in metric.name}
_PATTERNS = [(re.compile(re.sub(r"<\w+>", "[^/]+", metric.name)), metric) for metric in CATALOGUE if "<" in metric.name]


def find(name: str) -> Metric | None:
    """The catalogue's entry for `name`, under that name where the entry is a pattern; None where there is none."""
    if name in _FIXED:
        return _FIXED[name]
    return next((replace(metric, name=name) for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def describe(name: str) -> Metric:
    """The catalogue's entry for `name`.

    Raises:
        KeyError: the name is not in the catalogue; names the nearest one.
    """
    metric = find(name)
    if metric is None:
        nearest = difflib.get_close_matches(name, [metric.name for metric in CATALOGUE], n=1, cutoff=0.0)[0]
        raise KeyError(f"{name} is not in the catalogue of metrics; the nearest is {nearest}")
    return metric


def duration(seconds: float) -> str:
    """Readable seconds: under 1 ms, 12 ms, 4.2 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.001 else "under 1 ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    return f"{minutes} min {round(seconds) % 60:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


class Meter:
    """Collects the numbers of one step on this rank and reduces them over all ranks.

    The layout of the reduction is fixed when the meter is made, from the catalogue and from the names of the
    reward functions and evaluation sets, which every rank has from the same configuration. So a rank may leave
    out a metric that the others have, and no set of `add` calls can misalign or hang the collectives.
    """

    def __init__(
        self, rewards: Sequence[str] = (), evals: Sequence[str] = (), device: torch.device | str = "cpu"
    ) -> None:
        """`device` is where collectives take place: the rank's GPU with NCCL."""
        names = {"<function>": rewards, "<set>": evals}
        self._metrics = dict(_FIXED)
        for _, metric in _PATTERNS:
            placeholder = metric.name.split("/")[1]
            expanded = (metric.name.replace(placeholder, name) for name in names[placeholder])
            self._metrics.update((name, describe(name)) for name in expanded)
        self._device = torch.device(device)
        self._added: dict[str, list[tuple[float | Tensor, float]]] = {}

    def add(self, name: str, value: float | Tensor, count: float = 1) -> None:
        """Add a number, or a 0-d tensor, which is read only at `reduce`, so that nothing waits for the GPU here.

        `count` is the weight of the value in a mean: how many items it averages. A value of count 0 is left
        out whatever it is, so the mean of nothing (NaN) may be added.
        """
        if name not in self._metrics:
            describe(name)
            raise KeyError(f"{name} is of a reward or evaluation set that this meter was not made for")
        if count:
            kept = value.detach().clone() if isinstance(value, Tensor) else value
            self._added.setdefault(name, []).append((kept, count))

    def update(self, numbers: Mapping[str, tuple[float | Tensor, float]]) -> None:
        """Add what a stage measured: value and count by name."""
        for name, (value, count) in numbers.items():
            self.add(name, value, count)

    def total(self, name: str) -> float:
        """The sum of what was added under a name on this rank since the last `reduce`."""
        return sum(float(value) for value, _ in self._added.get(name, ()))

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds the block takes; work still queued on the GPU is waited for, before and after."""
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self.add(name, time.perf_counter() - start)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def reduce(self) -> dict[str, float]:
        """The numbers of the step by name, the same on all ranks; the meter is empty afterwards.

        A metric that no rank added is left out. All ranks must call it: two collectives.
        """
        sums = torch.zeros(len(self._metrics), 2, dtype=torch.float64)
        highs = torch.full_like(sums, -math.inf)
        for row, metric in enumerate(self._metrics.values()):
            added = [(float(value), count) for value, count in self._added.get(metric.name, ())]
            if added:
                sums[row] = torch.tensor(_total(added, metric.reduction), dtype=torch.float64)
                highs[row] = torch.tensor(_extrema(added, metric.reduction), dtype=torch.float64)
        self._added = {}
        sums = distributed.all_reduce(sums.to(self._device), "sum").cpu()
        highs = distributed.all_reduce(highs.to(self._device), "max").cpu()
        rows = zip(self._metrics.values(), sums.tolist(), highs.tolist(), strict=True)
        return {
            metric.name: _value(metric, total, count, high, -minus_low)
            for metric, (total, count), (high, minus_low) in rows
            if count
        }


def _total(added: list[tuple[float, float]], reduction: Reduction) -> tuple[float, float]:
    """What the sum over ranks takes in: total and count; for extrema only whether one of the values is NaN."""
    if reduction == "mean":
        return sum(value * count for value, count in added), sum(count for _, count in added)
    if reduction in ("sum", "rank_mean"):
        return sum(value for value, _ in added), 1
    return (math.nan if any(math.isnan(value) for value, _ in added) else 0.0), 1


def _extrema(added: list[tuple[float, float]], reduction: Reduction) -> tuple[float, float]:
    """What the maximum over ranks takes in: the highest value, and minus the lowest one.

    A comparison with NaN has no defined outcome in a collective: NaN is left out, and carried by the total.
    """
    values = [value for value, _ in (added[-1:] if reduction == "same" else added) if not math.isnan(value)]
    return (max(values), -min(values)) if values else (-math.inf, -math.inf)


def _value(metric: Metric, total: float, count: float, high: float, low: float) -> float:
    if metric.reduction == "sum":
        return total
    if metric.reduction in ("mean", "rank_mean"):
        return total / count
    if math.isnan(total):
        return math.nan
    assert metric.reduction != "same" or high == low, f"{metric.name} differs between ranks: {low} to {high}"
    return low if metric.reduction == "min" else high
