"""Signs that the policy learns the reward function instead of the task: what rewards go along with inside a group, and
a training reward that rises while held-out accuracy falls."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from hybrid_grpo.data.batch import Numbers, Rollout, Scores

_NGRAM = 3
"""As in the built-in reward `repetition_penalty`."""


def measure_health(rollout: Rollout, scores: Scores) -> Numbers:
    """What the rewards of a rollout go along with. Groups whose rewards are equal say nothing."""
    shape = (len(rollout.prompts), rollout.num_generations)
    reward_PG = scores.reward_B.view(shape)
    repetition_B = repeated_share([completion.token_ids for completion in rollout.completions], _NGRAM)
    numbers: Numbers = {"health/repetition_mean": (repetition_B.mean(), len(repetition_B))}
    for name, value_B in (
        ("length", torch.tensor(rollout.lengths, dtype=torch.float64)),
        ("repetition", repetition_B),
    ):
        correlation_P = group_correlation(reward_PG, value_B.view(shape))
        numbers[f"health/reward_{name}_corr"] = correlation_P.nanmean(), int((~correlation_P.isnan()).sum())
    highest_P1 = reward_PG.nan_to_num(-math.inf).amax(1, keepdim=True)
    lowest_P1 = reward_PG.nan_to_num(math.inf).amin(1, keepdim=True)
    best_PG = (reward_PG == highest_P1) & (highest_P1 > lowest_P1)
    clipped_B = torch.tensor([completion.finish == "length" for completion in rollout.completions])
    clipped_N = clipped_B.view(shape)[best_PG].double()
    numbers["health/best_clipped_frac"] = clipped_N.mean(), len(clipped_N)
    return numbers


def group_correlation(reward_PG: Tensor, value_PG: Tensor) -> Tensor:
    """float64 [P], Pearson correlation of rewards with another number inside each group.

    NaN where all rewards or all numbers of a group are equal; completions whose reward is NaN are left out.
    """
    applies_PG = ~reward_PG.isnan()
    count_P1 = applies_PG.sum(1, keepdim=True).clamp(min=1)
    centred, varies_P = [], torch.ones(len(reward_PG), dtype=torch.bool)
    for number_PG in (reward_PG.double(), value_PG.double()):
        highest_P = torch.where(applies_PG, number_PG, -torch.inf).amax(1)
        lowest_P = torch.where(applies_PG, number_PG, torch.inf).amin(1)
        varies_P &= highest_P > lowest_P
        mean_P1 = torch.where(applies_PG, number_PG, 0.0).sum(1, keepdim=True) / count_P1
        centred.append(torch.where(applies_PG, number_PG - mean_P1, 0.0))
    one_PG, other_PG = centred
    correlation_P = (one_PG * other_PG).sum(1) / (one_PG.square().sum(1) * other_PG.square().sum(1)).sqrt()
    return torch.where(varies_P, correlation_P, torch.nan)


def repeated_share(token_ids: list[list[int]], ngram: int) -> Tensor:
    """float64 [B], the share of each completion's n-grams that repeat an earlier one; 0 where it is shorter than one.

    N-grams are told apart by a 64-bit hash.
    """
    lengths = np.array([len(ids) for ids in token_ids], dtype=np.int64)
    token_N = np.fromiter(chain.from_iterable(token_ids), dtype=np.uint64, count=int(lengths.sum()))
    row_N = np.repeat(np.arange(len(lengths)), lengths)
    count = max(len(token_N) - ngram + 1, 0)
    hash_K = np.zeros(count, dtype=np.uint64)
    for number_K in (row_N[:count].astype(np.uint64), *(token_N[k : k + count] for k in range(ngram))):
        # Multiplied and shifted as in splitmix64, modulo 2^64.
        hash_K = (hash_K + number_K + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
        hash_K ^= hash_K >> np.uint64(29)
    whole_K = row_N[:count] == row_N[ngram - 1 : ngram - 1 + count]
    _, first = np.unique(hash_K[whole_K], return_index=True)
    ngrams_B = np.bincount(row_N[:count][whole_K], minlength=len(lengths))
    different_B = np.bincount(row_N[:count][whole_K][first], minlength=len(lengths))
    return torch.from_numpy(np.where(ngrams_B > 0, 1 - different_B / np.maximum(ngrams_B, 1), 0.0))


@dataclass(frozen=True)
class Evaluation:
    """One evaluation, and the training before it."""

    step: int
    accuracy: float
    reward: float
    """Training reward, averaged over the steps since the evaluation before; of step 0 that of the first step."""


class HeldoutWatch:
    """Compares every evaluation with the best one so far.

    Args:
        limit: how much accuracy may fall below its best while the training reward rises.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._rewards: list[float] = []
        self._best: Evaluation | None = None

    def watch(self, step: int, values: dict[str, float]) -> str | None:
        """Add what follows from the numbers of a step to them; what there is to warn of."""
        reward = values.get("reward/mean")
        if reward is not None:
            self._rewards.append(reward)
            if self._best and math.isnan(self._best.reward):
                self._best = replace(self._best, reward=reward)
        stage = next((name.removesuffix("/accuracy") for name in values if name.endswith("/accuracy")), None)
        if stage is None:
            return None
        now = Evaluation(step, values[f"{stage}/accuracy"], fmean(self._rewards) if self._rewards else math.nan)
        self._rewards = []
        if reward is not None and f"{stage}/reward_mean" in values:
            values["health/heldout_gap"] = reward - values[f"{stage}/reward_mean"]
        best = self._best
        if best is None or now.accuracy >= best.accuracy:
            self._best = best = now
        alarm = best.accuracy - now.accuracy > self._limit and now.reward > best.reward
        values["health/alarm"] = float(alarm)
        if not alarm:
            return None
        return (
            f"held-out accuracy is {now.accuracy:.3f} after {best.accuracy:.3f} at step {best.step}, while the training"
            f" reward rose from {best.reward:.3f} to {now.reward:.3f}: the policy may be learning the reward functions"
            " instead of the task; look at health/* and at the best completions in rollouts/ (log.heldout_alarm)"
        )
