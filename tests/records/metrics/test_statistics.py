"""Statistics of an evaluation: equal to their definitions by enumeration, and as sure as they say."""

import math
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from hybrid_grpo.records.metrics import statistics
from hybrid_grpo.records.metrics.statistics import (
    compare,
    interval,
    majority_at_k,
    pass_at_k,
    share_interval,
    standard_error,
)


def test_pass_at_k_is_the_share_of_choices_with_a_right_completion():
    for n in range(1, 9):
        for k in range(1, n + 1):
            right_PG = [[i < c for i in range(n)] for c in range(n + 1)]
            exact = [np.mean([any(chosen) for chosen in combinations(row, k)]) for row in right_PG]
            assert pass_at_k(right_PG, k) == pytest.approx(exact, abs=1e-12)
    # As sums of logarithms or quotients of factorials it would overflow or lose its digits.
    assert pass_at_k([[True] + [False] * 9999], 5000) == pytest.approx([0.5], abs=1e-12)


def majority_by_enumeration(answers: list[str], right: set[str], k: int) -> float:
    wins = []
    for chosen in combinations(answers, k):
        counts = Counter(chosen)
        best = [answer for answer, count in counts.items() if count == max(counts.values())]
        wins.append(sum(answer in right for answer in best) / len(best))
    return float(np.mean(wins))


def test_majority_at_k_is_the_mean_over_all_choices_with_ties_shared():
    """All ways to give up to 7 answers of 4 kinds, of which none, one or two kinds are right."""
    for counts in product(range(8), repeat=4):
        if not 0 < sum(counts) <= 7 or counts[2] < counts[3]:
            continue
        answers = [letter for letter, count in zip("abcd", counts, strict=True) for _ in range(count)]
        for right in ({"a"}, {"a", "b"}) if len(answers) < 6 else ({"a", "c"},):
            for k in range(1, len(answers) + 1):
                exact = majority_by_enumeration(answers, right, k)
                found = majority_at_k(answers, [answer in right for answer in answers], k)
                assert found == pytest.approx(exact, abs=1e-12), (answers, right, k)


def test_completions_without_an_answer_agree_with_nothing():
    assert majority_at_k([None, None, None, "a", "a"], [False] * 3 + [True] * 2, 5) == 1.0
    assert majority_at_k([None, None], [True, False], 2) == 0.5
    # 64 completions, half of which agree: the definition by enumeration has 6e17 choices.
    answers = ["a"] * 32 + [str(i) for i in range(32)]
    assert majority_at_k(answers, [answer == "a" for answer in answers], 32) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("prompts, samples, ability", [(50, 2, 1.0), (400, 1, 8.0)])
def test_intervals_hold_as_often_as_they_say(prompts, samples, ability, monkeypatch):
    """2,000 evaluations of a model whose rate on a prompt is drawn from Beta(ability, 1)."""
    monkeypatch.setattr(statistics, "RESAMPLES", 2000)
    random = np.random.default_rng(0)
    rate_rP = random.beta(ability, 1.0, size=(2000, prompts))
    accuracy_rP = random.binomial(samples, rate_rP) / samples
    true = ability / (ability + 1)
    held = [low <= true <= high for low, high in map(share_interval, accuracy_rP)]
    assert 0.93 <= np.mean(held) <= 0.97
    errors = [standard_error(accuracy_P) for accuracy_P in accuracy_rP]
    assert np.mean(errors) == pytest.approx(accuracy_rP.mean(1).std(), rel=0.05)


def test_an_interval_of_equal_values_is_exact_or_none():
    assert share_interval([1.0] * 20) == pytest.approx((0.025 ** (1 / 20), 1.0))
    assert share_interval([0.0] * 20) == pytest.approx((0.0, 1 - 0.025 ** (1 / 20)))
    assert all(map(math.isnan, interval([2.5] * 20)))


@pytest.mark.filterwarnings("error")
def test_the_standard_error_is_that_of_a_sample_and_nothing_is_known_of_one_prompt():
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0) and standard_error([2.0, 2.0]) == 0.0
    assert math.isnan(standard_error([1.0])) and math.isnan(standard_error([]))


def test_a_paired_comparison_says_what_is_chance():
    """Of equal models p is uniform; of better ones it is small, and all exchanges are tried where there are few."""
    random = np.random.default_rng(1)
    one_rP, other_rP = (random.random((200, 40)) < 0.6 for _ in range(2))
    p_r = [compare(one_P, other_P).p for one_P, other_P in zip(one_rP, other_rP, strict=True)]
    assert np.mean(np.array(p_r) < 0.05) == pytest.approx(0.05, abs=0.03) and np.mean(p_r) > 0.45
    better = compare([1.0] * 6 + [0.0, 1.0], [0.0] * 6 + [0.0, 1.0])
    assert better.difference == 0.75 and better.p == 2 / 2**6 and 0 < better.low < 0.75 < better.high
    same = compare([1.0, 0.0], [1.0, 0.0])
    assert (same.difference, same.p) == (0.0, 1.0)
    many = compare([1.0] * 60 + [0.0] * 20, [0.0] * 60 + [1.0] * 20)
    assert many.difference == 0.5 and many.p < 0.001
