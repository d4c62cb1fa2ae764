"""Advantages against numpy in float64, and the laws that training relies on."""

import itertools

import numpy as np
import pytest
import torch

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.grpo.advantages import (
    group_advantages,
    informative,
    normalized_rewards,
    overlong_penalty,
    penalized_rewards,
)
from hybrid_grpo.grpo.loss import policy_loss, token_weights

BASELINES = ["mean", "leave_one_out"]
SCALES = ["group", "batch", "none"]
NAN = float("nan")
every_option = pytest.mark.parametrize("baseline, scale", list(itertools.product(BASELINES, SCALES)))


def over_ranks(parts, advantages):
    """Advantages of the parts, each by itself but for a sum over all of them."""
    seen = []
    for part in parts:
        advantages(part, sum_over_ranks=lambda local: seen.append(local) or local)
    assert all(local.dtype == torch.float64 for local in seen)
    return torch.cat([advantages(part, sum_over_ranks=lambda local: sum(seen)) for part in parts])


def test_the_numbers_of_one_group() -> None:
    # mean 0.25, deviations (0.75, -0.25 x 3), unbiased variance (0.5625 + 3 * 0.0625) / 3 = 0.25
    reward = torch.tensor([1.0, 0.0, 0.0, 0.0])
    by_option = {
        ("mean", "group"): [0.75 / 0.5001] + [-0.25 / 0.5001] * 3,
        ("mean", "none"): [0.75, -0.25, -0.25, -0.25],
        # The others of the first have mean 0, those of the rest 1/3.
        ("leave_one_out", "none"): [1.0, -1 / 3, -1 / 3, -1 / 3],
        ("leave_one_out", "group"): [1 / 0.5001] + [-1 / 3 / 0.5001] * 3,
        ("mean", "batch"): [0.75 / 0.5001] + [-0.25 / 0.5001] * 3,
        # unbiased variance (1 + 3 / 9) / 3
        ("leave_one_out", "batch"): [1 / (2 / 3 + 1e-4)] + [-1 / 3 / (2 / 3 + 1e-4)] * 3,
    }
    for (baseline, scale), expected in by_option.items():
        assert group_advantages(reward, 4, baseline=baseline, scale=scale).tolist() == pytest.approx(expected, rel=1e-6)


@every_option
@pytest.mark.parametrize("value", [0.1 * 3, 0.1, 1 / 3, 1e-12, -7.3, 1e9 + 0.1, 0.0])
@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 10, 13, 64])
def test_equal_rewards_have_no_advantage_at_all(baseline, scale, value: float, size: int) -> None:
    """In floating point the mean of equal numbers can miss them by a digit, and dividing by the std, which is then
    rounding noise too, would make a gradient out of it."""
    for reward in (torch.full((size,), value, dtype=torch.float64), torch.full((size,), value, dtype=torch.float32)):
        assert group_advantages(reward, size, baseline=baseline, scale=scale).eq(0).all()
    beside = torch.cat([torch.full((size,), value, dtype=torch.float64), torch.arange(size).double()])
    assert group_advantages(beside, size, baseline=baseline, scale=scale)[:size].eq(0).all()


def test_the_test_above_can_fail() -> None:
    reward = torch.full((3,), 0.1, dtype=torch.float64)
    assert (reward - reward.mean()).ne(0).any()


def test_unequal_rewards_always_have_an_advantage_however_near() -> None:
    near = torch.tensor([1.0, np.nextafter(1.0, 2.0)], dtype=torch.float64)
    assert group_advantages(near, 2, baseline="mean", scale="none").ne(0).any()
    # The epsilon holds rounding noise down.
    assert group_advantages(near, 2, baseline="mean", scale="group").abs().max() < 1e-9
    assert informative(near, 2).tolist() == [True]


@every_option
def test_laws(baseline, scale) -> None:
    def advantages(reward: torch.Tensor) -> torch.Tensor:
        return group_advantages(reward.flatten(), 8, baseline=baseline, scale=scale).view(-1, 8)

    reward = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    advantage = advantages(reward)
    assert advantage.sum(1).abs().max() < 1e-5  # a group has as much praise as blame
    assert torch.allclose(advantage, advantages(reward + torch.arange(12)[:, None]), atol=1e-6)
    tenfold = 10.0 if scale == "none" else 1.0
    assert torch.allclose(advantages(10 * reward), tenfold * advantage, rtol=1e-3)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(advantages(reward[order]), advantage[order], rtol=1e-6)
    inside = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(advantages(reward[:, inside]), advantage[:, inside], rtol=1e-6)


@every_option
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_split_over_ranks_changes_neither_advantages_nor_gradient(baseline, scale, ranks) -> None:
    generator = torch.Generator().manual_seed(3)
    reward = torch.randint(0, 3, (24,), generator=generator).double()
    reward[:4] = 0.3
    whole = group_advantages(reward, 4, baseline=baseline, scale=scale)

    def advantages(part, sum_over_ranks):
        return group_advantages(part, 4, baseline=baseline, scale=scale, sum_over_ranks=sum_over_ranks)

    split = over_ranks(reward.chunk(ranks), advantages)
    assert torch.allclose(split, whole, rtol=1e-6) and not split[:4].any()
    mask = torch.arange(5) < torch.randint(1, 6, (24, 1), generator=generator)
    totals = {"total_tokens": int(mask.sum()), "total_rows": 24, "max_completion_tokens": 5}
    logp = -torch.rand(24, 5, generator=generator)
    gradients = []
    for parts in (1, ranks):
        now = logp.clone().requires_grad_()
        for rows in torch.arange(24).chunk(parts):
            weight = token_weights(mask[rows], "dapo", **totals)
            advantage = (whole if parts == 1 else split)[rows, None].expand(-1, 5)
            policy_loss(now[rows], logp[rows] - 0.1, advantage, weight, GrpoConfig(), beta=0.0)[0].backward()
        gradients.append(now.grad)
    assert torch.allclose(*gradients, rtol=1e-6, atol=1e-12) and not gradients[1][:4].any()
    assert gradients[1][4:].any()


def gdpo(by_function, weights, groups: int, size: int) -> np.ndarray:
    """Function by function, over those it applies to; then the sum, normalized over the batch."""
    total = np.zeros((groups, size))
    for name, values in by_function.items():
        for g, row in enumerate(values.reshape(groups, size)):
            real = row[~np.isnan(row)]
            if len(real) > 1 and np.ptp(real) > 0:
                total[g] += weights[name] * np.nan_to_num((row - real.mean()) / (real.std(ddof=1) + 1e-4))
    return ((total - total.mean()) / (total.std(ddof=1) + 1e-4)).reshape(-1)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("baseline", BASELINES)
def test_gdpo_agrees_with_numpy_over_any_ranks(baseline, ranks) -> None:
    rng = np.random.default_rng(0)
    by_function = {"right": rng.integers(0, 2, 48).astype(float), "length": rng.normal(0, 50, 48)}
    by_function["sometimes"] = np.where(rng.random(48) < 0.4, NAN, rng.normal(5, 1, 48))
    by_function["sometimes"][:8] = [NAN] * 7 + [3.0]  # applies once in its group, which is nothing to compare
    by_function["sometimes"][8:16] = NAN
    by_function["right"][16:24] = 0.1
    weights = {"right": 1.0, "length": 0.25, "sometimes": -2.0}
    expected = gdpo(by_function, weights, 6, 8)

    def advantages(part, sum_over_ranks):
        tensors = {name: torch.from_numpy(values)[part] for name, values in by_function.items()}
        reward = normalized_rewards(tensors, weights, 8)
        assert reward.dtype == torch.float64
        return group_advantages(reward, 8, baseline=baseline, scale="batch", sum_over_ranks=sum_over_ranks)

    mine = over_ranks(torch.arange(48).chunk(ranks), advantages)
    # Against the mean of the others all are 8/7 as far, and so is their deviation; but not the epsilon.
    assert np.allclose(mine.numpy(), expected, rtol=1e-6 if baseline == "mean" else 1e-4, atol=1e-9)


def test_gdpo_tells_apart_what_a_sum_mixes_up_and_is_zero_where_all_are_equal() -> None:
    right, form = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    both = normalized_rewards({"right": right, "form": 10 * form}, {"right": 1.0, "form": 1.0}, 4)
    assert both.tolist() == pytest.approx([0.0, 0.0, 1.7315, -1.7315], abs=1e-3)
    equal = {"a": torch.full((12,), 0.1), "b": torch.full((12,), 1 / 3), "c": torch.full((12,), NAN)}
    nothing = normalized_rewards(equal, dict.fromkeys(equal, 0.7), 6)
    assert nothing.eq(0).all() and group_advantages(nothing, 6, baseline="mean", scale="batch").eq(0).all()


@every_option
def test_a_completion_without_a_reward_is_as_if_it_were_not_there(baseline, scale) -> None:
    """A group of four of which one has none is a group of three; of one or none it teaches nothing."""
    reward_B = torch.tensor([1.0, NAN, 0.5, 0.0], dtype=torch.float64)
    with_it = group_advantages(reward_B, 4, baseline=baseline, scale=scale)
    without = group_advantages(reward_B[[0, 2, 3]], 3, baseline=baseline, scale=scale)
    assert with_it[1] == 0.0 and torch.equal(with_it[[0, 2, 3]], without) and without[0] > 0
    alone = torch.tensor([NAN, 7.0, NAN, NAN, NAN, NAN], dtype=torch.float64)
    assert group_advantages(alone, 3, baseline=baseline, scale=scale).eq(0).all()


def test_groups_without_rewards_teach_nothing() -> None:
    reward_B = torch.tensor([NAN, 1.0, NAN, 1.0, 1.0, NAN, 0.0, 1.0, NAN, NAN, NAN, NAN], dtype=torch.float64)
    assert informative(reward_B, 3).tolist() == [False, False, True, False]


def test_groups_that_earned_one_sum_in_different_steps_teach_something() -> None:
    reward_B = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, NAN, 0.0, 2.0], dtype=torch.float64)
    early, late = [(1, 1.0)], [(2, 1.0)]
    steps = [early, late, late, late, early, [], [], [(3, 2.0)]]
    assert informative(reward_B, 2, steps).tolist() == [True, False, False, True]


def test_overlong_penalty_is_equation_13_of_dapo() -> None:
    penalty = overlong_penalty([1, 16, 17, 18, 20, 21, 100], 20, 4, 0.5)
    assert penalty == [0.0, 0.0, -0.125, -0.25, -0.5, -0.5, -0.5]
    assert overlong_penalty([1, 20, 30], 20, 0, 1.0) == [0.0, 0.0, 0.0]


def test_the_mean_penalty_for_length_is_that_of_what_the_policy_wrote():
    """A guest is punished as any other in its group; the number that is logged speaks of the policy alone."""
    lengths, guests = [4, 6, 8, 7], ["", "", "large", ""]
    completions = [Completion([0] * n, [], "stop", writer=guest) for n, guest in zip(lengths, guests, strict=True)]
    rollout = Rollout([Prompt(0, "", [0], {})], completions, 4)
    reward_B = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    scores = Scores(reward_B, {"f": reward_B}, {"f": torch.zeros(4, dtype=torch.int8)})
    grpo = GrpoConfig(overlong_buffer=4, overlong_penalty=1.0)
    penalized_B, numbers = penalized_rewards(rollout, scores, grpo, 8, {"f": 1.0})
    assert penalized_B.tolist() == [1.0, -0.5, 0.0, -0.75]
    mean, weight = numbers["reward/overlong_penalty"]
    assert float(mean) == pytest.approx(-1.25 / 3) and weight == 3
