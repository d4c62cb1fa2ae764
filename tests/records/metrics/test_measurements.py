"""Numbers of a step: rewards where functions do not apply or fail, and signs of reward hacking."""

import math

import numpy as np
import pytest
import torch

from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.records.metrics.measurements import (
    group_correlation,
    measure_health,
    measure_lengths,
    measure_machine,
    measure_rewards,
    measure_sampling,
    measure_sources,
)
from hybrid_grpo.records.metrics.meter import Meter

NAN = math.nan


def scores_of(values: list[float], statuses: list[int]) -> Scores:
    value_B = torch.tensor(values, dtype=torch.float64)
    status_B = torch.tensor(statuses, dtype=torch.int8)
    # Where the function does not apply (1) the reward is 0; where it failed (2, 3) there is none.
    return Scores(value_B.nan_to_num(0.0).masked_fill(status_B >= 2, NAN), {"f": value_B}, {"f": status_B})


def test_rewards_are_those_of_completions_that_have_one():
    meter = Meter()
    values = [4.0, 2.0, NAN, NAN, NAN, 9.0, NAN, NAN, NAN]
    meter.update(measure_rewards(scores_of(values, [0, 0, 2, 3, 1, 0, 2, 2, 2]), 3))
    assert meter.reduce() == {
        "reward/mean": pytest.approx(15 / 4),
        "reward/max": 9.0,
        "reward/min": 0.0,
        # Of groups with two rewards or more: 2 and 4; 0 and 9.
        "reward/std": pytest.approx((2**0.5 + 40.5**0.5) / 2),
        "reward/f/mean": 5.0,
        "reward/f/none_frac": pytest.approx(1 / 9),
        "reward/f/failed_frac": pytest.approx(5 / 9),
        "reward/f/timeout_frac": pytest.approx(1 / 9),
    }


def test_without_any_reward_the_shares_are_all_there_is():
    meter = Meter()
    meter.update(measure_rewards(scores_of([NAN] * 4, [2, 2, 3, 3]), 2))
    assert meter.reduce() == {"reward/f/none_frac": 0.0, "reward/f/failed_frac": 1.0, "reward/f/timeout_frac": 0.5}


def measured(groups: list[list[tuple[float, list[int], str]]], meters: int = 1) -> dict[str, float]:
    """The metrics of groups of (reward, tokens, finish), added to a meter in several parts, as by several ranks."""
    meter = Meter()
    for part in range(meters):
        mine = groups[part::meters]
        rows = [row for group in mine for row in group]
        completions = [Completion(ids, [0.0] * len(ids), finish) for _, ids, finish in rows]
        reward_B = torch.tensor([reward for reward, _, _ in rows], dtype=torch.float64)
        rollout = Rollout([Prompt(i, "p", [1], {}) for i in range(len(mine))], completions, len(groups[0]))
        meter.update(measure_health(rollout, Scores(reward_B, {"f": reward_B}, {"f": torch.zeros(len(rows))})))
    return meter.reduce()


def test_correlations_are_numpy_s_and_leave_out_what_says_nothing():
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=(5, 6)), rng.integers(1, 9, size=(5, 6)).astype(float)
    reward[1], value[2] = 0.1 + 0.2, 7.0
    reward[3, :2] = NAN
    reward[4, 1:] = NAN
    found = group_correlation(torch.tensor(reward), torch.tensor(value)).tolist()
    assert found[0] == pytest.approx(np.corrcoef(reward[0], value[0])[0, 1])
    assert found[3] == pytest.approx(np.corrcoef(reward[3, 2:], value[3, 2:])[0, 1])
    assert all(math.isnan(found[p]) for p in (1, 2, 4)), "equal rewards, equal values, a single completion"


def test_a_reward_of_length_and_repetition_shows():
    paid_for_length = [(float(n), list(range(n)), "stop" if n < 9 else "length") for n in (3, 5, 7, 9)]
    paid_for_loops = [(1.0, [4] * 8, "stop"), (1.0, [5] * 8, "stop"), (0.0, list(range(8)), "stop"), (NAN, [1], "stop")]
    equal = [(0.5, list(range(n)), "length") for n in (2, 4, 6, 8)]
    values = measured([paid_for_length, paid_for_loops, equal])
    assert values["health/reward_length_corr"] == pytest.approx(1.0), "the only group in which both vary"
    assert values["health/reward_repetition_corr"] == pytest.approx(1.0)
    assert values["health/best_clipped_frac"] == pytest.approx(1 / 3), "the best of equal ones are none"
    assert values["health/repetition_mean"] == pytest.approx(2 * (5 / 6) / 12)
    assert values.keys() == measured([equal]).keys() | {n for n in values if "corr" in n or "best" in n}


def test_the_numbers_do_not_depend_on_the_ranks():
    rng = np.random.default_rng(1)
    groups = [
        [
            (float(rng.integers(3)), rng.integers(0, 4, size=n).tolist(), "length" if n > 20 else "stop")
            for n in rng.integers(1, 25, size=4)
        ]
        for _ in range(12)
    ]
    alone = measured(groups)
    assert len(alone) == 4
    for ranks in (2, 3):
        assert measured(groups, ranks) == pytest.approx(alone, rel=1e-12)


def test_the_times_of_sampling_are_those_of_its_stages_and_guests_are_not_sampled():
    spans = [("gather", 1.0, 3.0), ("generate", 3.0, 8.0), ("release", 8.0, 9.0), ("wait", 9.0, 9.5)]
    rows = [Completion([1] * 3, [], "stop"), Completion([1] * 4, [], "stop", writer="g")]
    for captures in (None, 2):
        numbers = measure_sampling(Rollout([Prompt(0, "p", [1], {})], rows, 2), spans, captures)
        assert numbers["time/generate_s"] == (5.5, 1) and numbers["time/gather_s"] == (2.0, 1)
        assert numbers["time/switch_s"] == (3.0, 1) and numbers["completion/sampled_tokens"] == (3, 1)
        assert numbers.get("throughput/graph_captures") == (None if captures is None else (2, 1))


def test_sources_are_counted_by_prompt_and_right_at_the_threshold():
    prompts = [Prompt(i, "p", [1], {}, source=source) for i, source in enumerate("aab")]
    rollout = Rollout(prompts, [Completion([1], [0.0], "stop")] * 6, 2)
    reward_B = torch.tensor([1.0, 2.0, NAN, 3.0, 5.0, 7.0], dtype=torch.float64)
    outcome_B = torch.tensor([0.5, 0.4, 0.6, NAN, 0.5, 0.0], dtype=torch.float64)
    meter = Meter()
    meter.update(measure_sources(rollout, Scores(reward_B, {}, {}), outcome_B, 0.5))
    assert meter.reduce() == {
        **{"source/a/count": 2, "source/a/reward": 2.0, "source/a/accuracy": pytest.approx(2 / 3)},
        **{"source/b/count": 1, "source/b/reward": 6.0, "source/b/accuracy": 0.5},
    }


def test_lengths_of_one_completion_and_memory_are_weighed_by_one():
    one = measure_lengths("eval/a", [Completion([1] * 3, [0.0] * 3, "length")])
    assert one == {"eval/a/length_mean": (3.0, 1), "eval/a/clipped_frac": (1.0, 1)}
    numbers = measure_machine()
    assert numbers["memory/rss_gb"][1] == 1 and 0 <= numbers["throughput/host_busy_frac"][0] <= 1
