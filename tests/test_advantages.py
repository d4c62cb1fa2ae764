"""Advantages against numpy in float64, and the laws that training relies on."""

import numpy as np
import pytest
import torch

from hybrid_grpo.rewards.advantages import GroupStats, group_advantages, group_stats


def test_the_numbers_of_one_group() -> None:
    # mean 0.25, deviations (0.75, -0.25 x 3), unbiased variance (0.5625 + 3 * 0.0625) / 3 = 0.25
    advantage = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4, "group")
    assert advantage.tolist() == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3, rel=1e-7)
    assert group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4, "none").tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("groups, size", [(1, 2), (5, 8), (16, 16)])
def test_agrees_with_numpy(groups: int, size: int) -> None:
    reward = np.random.default_rng(groups).normal(3.0, 2.0, (groups, size))
    centred = reward - reward.mean(1, keepdims=True)
    scaled = centred / (reward.std(1, ddof=1, keepdims=True) + 1e-4)
    flat = torch.from_numpy(reward.reshape(-1))
    assert np.array_equal(group_advantages(flat, size, "none").numpy(), centred.reshape(-1).astype(np.float32))
    assert np.allclose(group_advantages(flat, size, "group").numpy(), scaled.reshape(-1), rtol=1e-6, atol=0)
    assert group_advantages(flat, size, "group").dtype == torch.float32


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("value", [0.1 * 3, 0.1, 1 / 3, 1e-12, -7.3, 1e9 + 0.1, 0.0])
@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 10, 13, 64])
def test_equal_rewards_have_no_advantage_at_all(scale, value: float, size: int) -> None:
    """In floating point the mean of equal numbers can miss them by a digit, and dividing by the std, which is then
    rounding noise too, would make a gradient out of it."""
    assert group_advantages(torch.full((size,), value, dtype=torch.float64), size, scale).eq(0).all()
    assert group_advantages(torch.full((size,), value, dtype=torch.float32), size, scale).eq(0).all()


def test_the_test_above_can_fail() -> None:
    reward = torch.full((3,), 0.1, dtype=torch.float64)
    assert (reward - reward.mean()).ne(0).any()


def test_unequal_rewards_always_have_an_advantage_however_near() -> None:
    near = torch.tensor([1.0, np.nextafter(1.0, 2.0)], dtype=torch.float64)
    assert group_advantages(near, 2, "none").ne(0).any()
    assert group_advantages(near, 2, "group").abs().max() < 1e-9  # the epsilon holds rounding noise down


def test_laws() -> None:
    reward = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flat = reward.flatten()
    advantage = group_advantages(flat, 8, "group").view(12, 8)
    assert advantage.sum(1).abs().max() < 1e-5  # a group has as much praise as blame
    assert torch.allclose(advantage, group_advantages(flat + 100.0, 8, "group").view(12, 8), atol=1e-6)
    tenfold = group_advantages(flat * 10, 8, "none")
    assert torch.allclose(tenfold, 10 * group_advantages(flat, 8, "none"), rtol=1e-6)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.equal(group_advantages(reward[order].flatten(), 8, "group").view(12, 8), advantage[order])
    assert torch.equal(group_advantages(flat[:32], 8, "group"), advantage[:4].flatten())  # a split changes nothing


def test_group_stats_counts_each_kind_once() -> None:
    nan = float("nan")
    outcome = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, nan, 0.2, nan, 1.0])
    reward = torch.tensor([1.5, 1.0, 0.3, 0.3, 1.0, 0.0, 0.0, 0.0, 2.0, 2.0], dtype=torch.float64)
    # groups: right (unequal), wrong (equal), mixed, wrong with one not applicable (equal), mixed (equal)
    assert group_stats(reward, outcome, 2, 1.0) == GroupStats(groups=5, zero_std=3, all_right=1, all_wrong=2)


def test_group_stats_counts_the_threshold_itself_as_right() -> None:
    outcome = torch.tensor([0.5, 0.5, 0.5, 0.49])
    assert group_stats(outcome, outcome, 2, 0.5) == GroupStats(groups=2, zero_std=1, all_right=1, all_wrong=0)


def test_group_stats_of_no_rows() -> None:
    empty = torch.empty(0, dtype=torch.float64)
    assert group_stats(empty, empty, 4, 1.0) == GroupStats(0, 0, 0, 0)
