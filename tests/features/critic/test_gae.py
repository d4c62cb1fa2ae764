"""Advantages and losses of a critic against numpy in float64, written out token by token."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import in_ranks

from hybrid_grpo.config import GrpoConfig, RewardConfig, RolloutConfig, TrainConfig
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.distributed.ranks import sum_over_ranks
from hybrid_grpo.features.critic.critic import value_loss
from hybrid_grpo.features.critic.gae import (
    critic_advantages,
    generalized_advantages,
    moments,
    token_rewards,
)
from hybrid_grpo.features.critic.settings import CriticConfig

LENGTHS = [5, 1, 7, 3]
CPU = torch.device("cpu")
NAN = float("nan")
Rows = list[np.ndarray]


def random_rows(seed: int) -> Rows:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=length) for length in LENGTHS]


def padded(rows: Rows, filler: float = NAN) -> torch.Tensor:
    """Padding holds what must have no part in anything."""
    values_BT = torch.full((len(rows), max(LENGTHS)), filler, dtype=torch.float64)
    for row, values in enumerate(rows):
        values_BT[row, : len(values)] = torch.from_numpy(values)
    return values_BT


MASK_BT = ~padded(random_rows(0)).isnan()


def by_definition(rewards: Rows, values: Rows, gamma: float, lam: float) -> Rows:
    """GAE, equations 11 to 16, as sums over all later tokens."""
    rows = []
    for r, v in zip(rewards, values, strict=True):
        d = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))]
        rows.append(np.array([sum((gamma * lam) ** (k - t) * d[k] for k in range(t, len(v))) for t in range(len(v))]))
    return rows


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0)])
def test_gae_is_its_definition(gamma: float, lam: float) -> None:
    rewards, values = random_rows(1), random_rows(2)
    advantage_BT = generalized_advantages(padded(rewards), padded(values), MASK_BT, gamma, lam)
    expected_BT = padded(by_definition(rewards, values, gamma, lam), 0.0)
    assert torch.allclose(advantage_BT, expected_BT, rtol=0, atol=1e-12)
    if lam == 1.0 and gamma == 1.0:
        to_go = [r[::-1].cumsum()[::-1] - v for r, v in zip(rewards, values, strict=True)]
        assert torch.allclose(advantage_BT, padded(to_go, 0.0), rtol=0, atol=1e-12)


def test_rewards_are_earned_at_the_last_token_and_where_steps_end() -> None:
    steps = [[(2, 0.5), (5, 0.25)], [(1, 2.0)], [], [(3, -1.0)]]
    reward_BT = token_rewards(torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.float64), steps, LENGTHS)
    assert reward_BT[0].tolist() == [0, 0.5, 0, 0, 1.25, 0, 0]
    assert reward_BT[1].tolist() == [4.0, 0, 0, 0, 0, 0, 0]
    assert reward_BT[2].tolist() == [0, 0, 0, 0, 0, 0, 3.0]
    assert reward_BT[3].tolist() == [0, 0, -1.0, 0, 0, 0, 0]


def estimated(reward: list[float], values: Rows, kl: Rows | None = None, grpo: Any = None, **critic: Any) -> Any:
    """Advantages, targets and numbers of a rollout of these rewards and values."""
    prompts = [Prompt(k, "", [1], {}) for k in range(len(LENGTHS))]
    rows = [Completion([1] * length, [0.0] * length, "stop") for length in LENGTHS]
    scores = Scores(torch.tensor(reward, dtype=torch.float64), {}, {})
    config = TrainConfig(
        rollout=RolloutConfig(prompts_per_step=4, num_generations=1, max_completion_tokens=8),
        grpo=GrpoConfig(**(grpo or {})),
        critic=CriticConfig(enabled=True, **critic),
        rewards=[RewardConfig("exact_match")],
    )
    kl_BT = None if kl is None else padded(kl, 0.0).float()
    return critic_advantages(Rollout(prompts, rows, 1), scores, config, padded(values, 0.0).float(), kl_BT, 0.1, CPU)


def test_the_whole_way_with_a_kl_and_a_length_penalty() -> None:
    values, kl = random_rows(3), [abs(row) for row in random_rows(4)]
    reward = [1.0, 0.0, 2.0, 1.5]
    # The completion of 7 tokens is 3 beyond the buffer of 4 before the limit of 8, which costs 3 / 4.
    earned = [-0.1 * row.astype(np.float32) for row in kl]
    for row, whole in zip(earned, [1.0 - 0.25, 0.0, 2.0 - 0.75, 1.5], strict=True):
        row[-1] += whole
    values = [row.astype(np.float32).astype(float) for row in values]
    expected = by_definition(earned, values, 0.9, 0.8)
    overlong = {"overlong_buffer": 4, "overlong_penalty": 1.0}
    settings = {"gamma": 0.9, "lam": 0.8}
    advantage_BT, targets, numbers = estimated(reward, values, kl, overlong, whiten=False, **settings)
    assert torch.allclose(advantage_BT.double(), padded(expected, 0.0), rtol=1e-6, atol=1e-6)
    returns = [a + v for a, v in zip(expected, values, strict=True)]
    assert torch.allclose(targets.return_BT[MASK_BT].double(), padded(returns)[MASK_BT], rtol=1e-6, atol=1e-6)
    assert targets.return_BT.isnan().equal(~MASK_BT)
    all_returns, errors = np.concatenate(returns), np.concatenate(expected)
    explained = 1 - errors.var(ddof=1) / all_returns.var(ddof=1)
    assert numbers["critic/explained_variance"][0].item() == pytest.approx(explained, rel=1e-6)
    assert numbers["critic/return"][0].item() == pytest.approx(all_returns.mean(), rel=1e-6)

    whitened_BT, *_ = estimated(reward, values, kl, overlong, **settings)
    flat = np.concatenate(expected)
    white = [(a - flat.mean()) / (flat.std(ddof=1) + 1e-4) for a in expected]
    assert torch.allclose(whitened_BT.double(), padded(white, 0.0), rtol=1e-6, atol=1e-6)


def test_a_completion_without_a_reward_teaches_nothing() -> None:
    values = random_rows(5)
    advantage_BT, targets, numbers = estimated([1.0, 0.0, NAN, 1.5], values)
    assert advantage_BT[2].eq(0).all() and advantage_BT.isfinite().all()
    assert targets.return_BT[2].isnan().all() and not targets.return_BT[0, :5].isnan().any()
    assert numbers["critic/return"][1] == 5 + 1 + 3
    value_BT = targets.old_value_BT.clone().requires_grad_()
    loss, told = value_loss(value_BT, targets.old_value_BT, targets.return_BT, MASK_BT.float(), CriticConfig())
    loss.backward()
    assert value_BT.grad is not None and value_BT.grad[2].eq(0).all() and value_BT.grad[0, :5].ne(0).all()
    assert told["critic/clip_frac"][1] == 9


def test_returns_that_are_equal_have_no_variance_to_be_explained() -> None:
    *_, numbers = estimated([0.1] * 4, [np.zeros(length) for length in LENGTHS])
    assert numbers["critic/explained_variance"][1] == 0 and numbers["critic/return"][0].item() == pytest.approx(0.1)


def test_moments_over_ranks_are_those_of_all() -> None:
    values, flat, rows = padded(random_rows(6)), np.concatenate(random_rows(6)), (slice(0, 1), slice(1, 4))

    def moments_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = values[rows[rank]]
        return moments((own, 3 * own + 1), MASK_BT[rows[rank]], partial(sum_over_ranks, device=CPU))

    for mean_2, variance_2 in in_ranks(2, moments_of):
        assert mean_2.tolist() == pytest.approx([flat.mean(), 3 * flat.mean() + 1])
        assert variance_2.tolist() == pytest.approx([flat.var(ddof=1), 9 * flat.var(ddof=1)])


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
def test_the_loss_of_values_is_its_definition(clip: float) -> None:
    old, new, returns = random_rows(7), random_rows(8), random_rows(9)
    weights = [abs(row) + 0.1 for row in random_rows(10)]

    def loss_of(values: Rows) -> float:
        total = 0.0
        for v, v_old, R, w in zip(values, old, returns, weights, strict=True):
            for t in range(len(v)):
                errors = [(v[t] - R[t]) ** 2]
                if clip > 0:
                    errors.append((np.clip(v[t], v_old[t] - clip, v_old[t] + clip) - R[t]) ** 2)
                total += w[t] * 0.5 * max(errors)
        return total

    value_BT = padded(new).requires_grad_()
    given = (padded(old), padded(returns), padded(weights, 0.0), CriticConfig(clip=clip))
    loss, numbers = value_loss(value_BT, *given)
    assert loss.item() == pytest.approx(loss_of(new), rel=1e-9)
    (gradient_BT,) = torch.autograd.grad(loss, value_BT)
    assert gradient_BT[~MASK_BT].eq(0).all()
    flat = 0
    for row, values in enumerate(new):
        for t in range(len(values)):
            ends = []
            for sign in (1, -1):
                moved = [v.copy() for v in new]
                moved[row][t] += sign * 1e-6
                ends.append(loss_of(moved))
            slope = (ends[0] - ends[1]) / 2e-6
            assert gradient_BT[row, t].item() == pytest.approx(slope, rel=1e-6, abs=1e-6)
            flat += slope == 0
    assert numbers["critic/clip_frac"][0].item() == pytest.approx(flat / sum(LENGTHS))
    assert (flat > 0) == (clip > 0)
