"""Statistics of a model's samples: pass@k, maj@k, and how certain a mean over prompts is.

Plain functions of numpy arrays; data/batch.py explains the letters P and G. A completion is right or wrong. Prompts are
drawn independently of each other, but the completions of one prompt are not, so errors and intervals are those of the
mean over prompts (clustered by prompt: arXiv:2411.00640).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 10_000
"""Number of resamples in a bootstrap or a test."""
_SEED = 0
_TAIL = (1 - 0.95) / 2
"""Probability beyond each end of an interval."""
_EXACT_PROMPTS = 13
"""Up to this number of prompts, a test tries all choices of signs, since there are fewer of them than RESAMPLES."""
_DRAWN_AT_ONCE = 2**22
"""Maximum number of random numbers in memory at a time."""


def pass_at_k(right_PG: Any, k: int) -> Floats:
    """Return the probability that at least one of k completions of a prompt is right, float64 [P].

    This is the unbiased estimate 1 - C(n - c, k) / C(n, k) for c right completions of n (Chen et al., arXiv:2107.03374,
    eq. 1), computed as a product of k fractions, which avoids overflow and cancellation.
    """
    right_PG = np.asarray(right_PG, dtype=bool)
    n, right_P = right_PG.shape[1], right_PG.sum(1)
    assert 1 <= k <= n
    taken_k = np.arange(k)
    wrong_left_Pk = np.maximum(n - right_P[:, None] - taken_k, 0)
    return 1.0 - np.prod(wrong_left_Pk / (n - taken_k), axis=1)


def majority_at_k(answers: Sequence[Any], right: Sequence[bool], k: int) -> float:
    """Return the probability that the most frequent answer of k completions is right.

    This is the exact mean over all choices of k completions of one prompt; ties between answers are broken at random.
    If only some completions with an answer are right, their share counts.

    Args:
        answers: [G], the answer of each completion, of any hashable type. None counts as a different answer each time.
        right: [G], whether each completion is right.
    """
    assert 1 <= k <= len(answers)
    counts: dict[Any, list[int]] = {}
    for index, (answer, value) in enumerate(zip(answers, right, strict=True)):
        found = counts.setdefault((index,) if answer is None else answer, [0, 0])
        found[0] += 1
        found[1] += value
    return _majority(tuple(sorted((given, rights) for given, rights in counts.values())), k)


@lru_cache(maxsize=2**14)
def _majority(counts: tuple[tuple[int, int], ...], k: int) -> float:
    """Compute `majority_at_k` from how often each answer is given and how often it is right, in pairs `counts`."""
    wins, given = Fraction(0), [count for count, _ in counts]
    for (own, rights), alike in Counter(counts).items():
        others = list(given)
        others.remove(own)
        for chosen in range(max(1, k - sum(others)), min(own, k) + 1) if rights else ():
            ways = _ways(others, chosen, k - chosen)
            shared = sum(Fraction(number, 1 + ties) for ties, number in enumerate(ways))
            wins += alike * Fraction(rights, own) * math.comb(own, chosen) * shared
    return float(wins / math.comb(sum(given), k))


def _ways(counts: list[int], most: int, total: int) -> list[int]:
    """Return in how many ways `total` completions can be chosen such that no answer is chosen more than `most` times:
    a list whose index is the number of answers that are chosen exactly `most` times."""
    rare = sum(count for count in counts if count < most)
    ties = total // most
    # ways[t][s]: choices of s completions among the answers so far, with t answers chosen `most` times.
    ways = [[math.comb(rare, size) for size in range(total + 1)], *([0] * (total + 1) for _ in range(ties))]
    frequent = [count for count in counts if count >= most]
    for seen, count in enumerate(frequent, start=1):
        # The most that the answers which are not tied can contribute.
        loose = rare + seen * (most - 1)
        for tied in reversed(range(min(seen, ties) + 1)):
            for size in reversed(range(tied * most, min(total, tied * most + loose) + 1)):
                fewer = range(min(most - 1, size) + 1)
                number = sum(math.comb(count, taken) * ways[tied][size - taken] for taken in fewer)
                if tied:
                    number += math.comb(count, most) * ways[tied - 1][size - most]
                ways[tied][size] = number
    return [by_size[total] for by_size in ways]


def standard_error(value_P: Any) -> float:
    """Return the standard error of the mean over prompts; NaN for fewer than two prompts."""
    value_P = np.asarray(value_P, dtype=np.float64)
    return float(value_P.std(ddof=1) / math.sqrt(len(value_P))) if len(value_P) > 1 else math.nan


def interval(value_P: Any) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean over prompts; NaN if all values are equal.

    The method is a bootstrap over prompts (Efron, 1979), with percentiles widened for few prompts (Hesterberg,
    arXiv:1411.5279, section 3.3).
    """
    value_P = np.asarray(value_P, dtype=np.float64)
    if np.all(value_P == value_P[0]):
        return math.nan, math.nan
    tail = _widened(_TAIL, len(value_P))
    low, high = np.quantile(_resampled_means(value_P), [tail, 1 - tail])
    return float(low), float(high)


def share_interval(value_P: Any) -> tuple[float, float]:
    """Like `interval`, for values from 0 to 1. If all are 0 or all are 1, the exact bound of Clopper and Pearson (1934)
    is used, since the interval would otherwise have no width."""
    value_P = np.asarray(value_P, dtype=np.float64)
    if np.ptp(value_P) or value_P[0] not in (0.0, 1.0):
        return interval(value_P)
    bound = _TAIL ** (1 / len(value_P))
    return (bound, 1.0) if value_P[0] else (0.0, 1 - bound)


def _widened(tail: float, count: int) -> float:
    """Return the normal probability below sqrt(n / (n - 1)) times the t quantile at `tail` with n - 1 degrees of
    freedom, where n is `count`. The quantile is computed by the expansion of Fisher and Cornish (1960)."""
    normal, freedom = NormalDist(), count - 1
    z = normal.inv_cdf(tail)
    quantile = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return normal.cdf(math.sqrt(count / freedom) * quantile)


def _resampled_means(value_P: Floats) -> Floats:
    """Return the means of RESAMPLES bootstrap samples, which are drawn as counts of the distinct values."""
    random, count = np.random.default_rng(_SEED), len(value_P)
    value_u, occurs_u = np.unique(value_P, return_counts=True)
    draws = (random.multinomial(count, occurs_u / count, size) @ value_u for size in _portions(len(value_u)))
    return np.concatenate(list(draws)) / count


def _portions(length: int) -> list[int]:
    """Divide RESAMPLES into portions, so small that each, with rows of this length, fits in memory."""
    at_once = max(1, _DRAWN_AT_ONCE // length)
    return [min(at_once, RESAMPLES - start) for start in range(0, RESAMPLES, at_once)]


@dataclass(frozen=True)
class Comparison:
    """How two models differ on the same prompts."""

    difference: float
    """The first model's number minus the second's, averaged over prompts."""
    low: float
    high: float
    """`low` and `high` bound the 95 % interval of `difference`; NaN if all prompts have the same difference."""
    prompts: int
    p: float
    """Probability of a difference at least this large if both models were equally good."""


def compare(one_P: Any, other_P: Any) -> Comparison:
    """Compare two models on the same prompts, in the same order, by one number per prompt.

    The interval is a bootstrap over prompts. p comes from the two-sided permutation test that swaps the models prompt
    by prompt (Fisher, 1935): in all ways if there are few prompts, otherwise in RESAMPLES random ways.
    """
    gap_P = np.asarray(one_P, dtype=np.float64) - np.asarray(other_P, dtype=np.float64)
    return Comparison(float(gap_P.mean()), *interval(gap_P), len(gap_P), _exchange_p(gap_P[gap_P != 0]))


def _exchange_p(gap_P: Floats) -> float:
    count = len(gap_P)
    if count <= _EXACT_PROMPTS:
        signs = (np.arange(2**count)[:, None] >> np.arange(count) & 1) * 2.0 - 1.0
        return float(np.mean(_as_large(signs @ gap_P, gap_P)))
    random = np.random.default_rng(_SEED)
    sums = (random.choice([-1.0, 1.0], (size, count)) @ gap_P for size in _portions(count))
    hits = sum(int(_as_large(sum_r, gap_P).sum()) for sum_r in sums)
    # Swapping nothing is one of the resamples, so that p is never 0.
    return (hits + 1) / (RESAMPLES + 1)


def _as_large(sum_r: Floats, gap_P: Floats) -> NDArray[np.bool_]:
    """Return whether each sum is at least as far from 0 as the sum of the gaps, up to rounding."""
    return np.abs(sum_r) >= abs(gap_P.sum()) - 1e-9 * np.abs(gap_P).sum()
