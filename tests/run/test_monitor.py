"""Rewards in the metrics, where functions do not apply or fail."""

import math

import pytest
import torch

from hybrid_grpo.config import EvalConfig
from hybrid_grpo.data.batch import Completion, Scores
from hybrid_grpo.run.metrics import Meter
from hybrid_grpo.run.monitor import measure_eval, measure_rewards

NAN = math.nan


def scores_of(values: list[float], statuses: list[int]) -> Scores:
    value_B = torch.tensor(values, dtype=torch.float64)
    status_B = torch.tensor(statuses, dtype=torch.int8)
    # Where the function does not apply (1) the reward is 0; where it failed (2, 3) there is none.
    return Scores(value_B.nan_to_num(0.0).masked_fill(status_B >= 2, NAN), {"f": value_B}, {"f": status_B})


def test_rewards_are_those_of_completions_that_have_one():
    meter = Meter(["f"])
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
    meter = Meter(["f"])
    meter.update(measure_rewards(scores_of([NAN] * 4, [2, 2, 3, 3]), 2))
    assert meter.reduce() == {"reward/f/none_frac": 0.0, "reward/f/failed_frac": 1.0, "reward/f/timeout_frac": 0.5}


def test_a_failure_in_an_evaluation_counts_as_wrong():
    meter = Meter(["f"], ["heldout"])
    completions = [Completion([1], [0.0], "stop")] * 4
    scores = scores_of([1.0, 0.25, NAN, NAN], [0, 0, 2, 1])
    meter.update(measure_eval(EvalConfig(threshold=0.5), "f", completions, scores))
    values = meter.reduce()
    assert values["eval/heldout/accuracy"] == 0.25 and values["eval/heldout/failed_frac"] == 0.25
    assert values["eval/heldout/reward_mean"] == pytest.approx(1.25 / 3)
