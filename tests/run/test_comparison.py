"""The comparison of rewards: its numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hybrid_grpo.config import GrpoConfig, RewardConfig, RolloutConfig, TrainConfig
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Rollout, Scores
from hybrid_grpo.data.completions import SavedStep
from hybrid_grpo.run.comparison import (
    Comparison,
    agreement_table,
    compare_advantages,
    compare_rewards,
    pearson,
    ranks,
)

NAN = math.nan


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_table_of_agreement_has_a_threshold_on_either_side():
    table = agreement_table(f64(1, 1, 0, 0, NAN, 1), f64(0.3, 0.2, 0.3, 0.2, 0.3, NAN), (1.0, 0.3))
    assert table.pop("agreement") == 0.5
    assert table == {"right_by_both": 1, "right_before_only": 1, "right_now_only": 1, "wrong_by_both": 1}
    assert math.isnan(agreement_table(f64(NAN), f64(1), (1.0, 1.0))["agreement"])


def test_correlations():
    x, y = f64(3, 1, 4, 1, 5, 9, 2, 6), f64(2, 7, 1, 8, 2, 8, 1, 8)
    assert pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-12)
    assert ranks(f64(10, 20, 20, 5, 20)).tolist() == [2.0, 4.0, 4.0, 1.0, 4.0]
    # Without ties 1 - 6 sum(d^2) / n (n^2 - 1): places 1 2 3 4 against 2 1 4 3.
    assert pearson(ranks(f64(1, 2, 3, 4)), ranks(f64(0.2, 0.1, 9.0, 0.3))) == pytest.approx(1 - 6 * 4 / (4 * 15))
    assert math.isnan(pearson(x, f64(*[0.1] * 8))) and math.isnan(pearson(f64(1), f64(1)))


def test_equal_rewards_are_perfectly_correlated_to_the_last_digit():
    torch.manual_seed(0)
    assert all(pearson(x, x.clone()) == 1.0 for x in torch.rand(50, 33, dtype=torch.float64))


def test_rewards_are_compared_on_the_completions_to_which_both_apply():
    made = compare_rewards(f64(1, 0, NAN, 1, 2), f64(0, 1, 1, NAN, 5), f64(10, 20, 30, 40, 50))
    assert (made["compared"], made["mean_before"], made["mean_now"]) == (3, 1.0, 2.0)
    assert made["spearman"] == 0.5
    assert made["length_pearson_before"] == pytest.approx(np.corrcoef([1, 0, 2], [10, 20, 50])[0, 1])
    assert made["length_pearson_now"] == pytest.approx(np.corrcoef([0, 1, 5], [10, 20, 50])[0, 1])


def test_what_becomes_of_advantages():
    before, now = [1.0, -1.0, 0.5, -0.5, 0.0, 0.0], [-1.0, 1.0, 0.5, 0.0, 0.0, 2.0]
    change = compare_advantages(torch.tensor([before, now]).T, f64(1, 0, 1, 0, 3, 3), f64(0, 1, 2, NAN, 0, 1), 2)
    assert (change["groups"], change["zero_std_before"], change["zero_std_now"]) == (3, 1 / 3, 1 / 3)
    assert change["equal_frac"] == pytest.approx(2 / 6) and change["sign_flips_frac"] == pytest.approx(2 / 6)
    assert change["pearson"] == pytest.approx(np.corrcoef(before, now)[0, 1])


def test_a_step_that_was_stopped_has_no_advantages_to_compare():
    advantages = torch.tensor([[1.0, -1.0, NAN, NAN], [1.0, 1.0, 5.0, -5.0]]).T
    change = compare_advantages(advantages, f64(1, 0, NAN, NAN), f64(1, 1, 1, 0), 2)
    assert (change["groups"], change["zero_std_before"], change["zero_std_now"]) == (2, 0.5, 0.5)
    assert (change["equal_frac"], change["sign_flips_frac"]) == (0.5, 0.5)


def saved_step(step: int, rewards: list[float]) -> SavedStep:
    prompts = [Prompt(10 * step + i, f"p{i}", [], {"answer": "a"}) for i in range(len(rewards) // 2)]
    rows = [Completion([-1] * 3, [], "stop", f"c{row}") for row in range(len(rewards))]
    return SavedStep(step, Rollout(prompts, rows, 2), scores("old", rewards), torch.zeros(len(rewards)), 0)


def scores(name: str, rewards: list[float]) -> Scores:
    reward_B = f64(*rewards)
    status = torch.where(reward_B.isnan(), RewardStatus.FAILED, RewardStatus.SCORED).to(torch.int8)
    return Scores(reward_B, {name: reward_B}, {name: status}, extra={f"{name}/why": [f"w{r}" for r in rewards]})


def test_the_largest_disagreements_are_kept_and_ties_go_by_the_change_of_the_advantage():
    config = TrainConfig(
        rollout=RolloutConfig(num_generations=2), grpo=GrpoConfig(scale_rewards="none"), rewards=[RewardConfig("new")]
    )
    comparison = Comparison(config, {"new": "old"}, (1.0, 0.5), limit=3)
    comparison.add(saved_step(1, [0, 0, 1, 0]), scores("new", [1, 1, 1, NAN]))
    comparison.add(saved_step(2, [0, 1, 0, 0]), scores("new", [0, 0.5, 1, 0]))
    worst = comparison.disagreements()
    # Of four, the smallest is left out; of distance 1 the one whose advantage changes (0 to 0.5) comes first.
    assert [(entry["step"], entry["group"], entry["sample"], entry["size"]) for entry in worst] == [
        (2, 1, 0, 1.0), (1, 0, 0, 1.0), (1, 0, 1, 1.0)
    ]  # fmt: skip
    comparison.add(saved_step(2, [0, 1, 0, 0]), scores("new", [0, 0.5, 1, 0]))
    assert comparison.disagreements() == worst, "the same prompt and text is not there twice"
    assert worst[0]["prompt"] == "p1" and worst[0]["completion"] == "c2" and worst[0]["extra"] == {"why": "w1"}
    assert worst[0]["reason"] == "wrong before, right now" and worst[0]["advantage_now"] == 0.5
    report = comparison.report()
    assert report["functions"]["new"]["failed_now"] == 1 and report["functions"]["new"]["compared"] == 11
    assert report["steps"] == [1, 2, 3] and report["completions"] == 12
