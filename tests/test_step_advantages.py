"""Process supervision: from rewards of steps to advantages of tokens, against numpy in float64."""

import numpy as np
import pytest
import torch

from hybrid_grpo.rewards.advantages import group_advantages, step_advantages


def ragged(seed: int, rows: int, size: int):
    """Steps at random places of random completions; every third completion has none."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, rows).tolist()
    steps = []
    for row, length in enumerate(lengths):
        ends = sorted(rng.choice(np.arange(1, length + 1), min(length, 3), replace=False).tolist()) if row % 3 else []
        steps.append([(end, float(rng.normal(2, 3))) for end in ends])
    return steps, lengths


def by_formula(steps, lengths, size: int, scale: str) -> np.ndarray:
    """DeepSeekMath, section 4.1.3, token by token."""
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    means = [np.mean([r for row in group for _, r in row]) for group in groups]
    every = [r - mean for group, mean in zip(groups, means, strict=True) for row in group for _, r in row]
    advantage = np.zeros((len(steps), max(lengths)))
    for i, row in enumerate(steps):
        rewards = [r for other in groups[i // size] for _, r in other]
        deviation = {
            "group": np.std(rewards, ddof=1) + 1e-4,
            "batch": np.sqrt(np.sum(np.square(every)) / (len(every) - 1)) + 1e-4,
            "none": 1.0,
        }
        for t in range(1, lengths[i] + 1):
            advantage[i, t - 1] = sum((r - means[i // size]) / deviation[scale] for end, r in row if end >= t)
    return advantage


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_numpy(scale, seed: int) -> None:
    steps, lengths = ragged(seed, 12, 4)
    mine = step_advantages(steps, lengths, 4, scale=scale)
    assert mine.dtype == torch.float32
    assert np.allclose(mine.numpy(), by_formula(steps, lengths, 4, scale), rtol=1e-6, atol=1e-6)


def test_by_hand() -> None:
    # mean 1, deviations (0, 1, -1), unbiased variance 1
    steps, lengths = [[(2, 1.0), (3, 2.0)], [(1, 0.0)]], [4, 2]
    expected = [[1.0, 1.0, 1.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]
    assert step_advantages(steps, lengths, 2, scale="none").tolist() == expected
    scaled = step_advantages(steps, lengths, 2, scale="group")
    assert torch.allclose(scaled, torch.tensor(expected) / 1.0001)
    together = [[(2, 1.0), (2, 2.0)], [(1, 0.0)]]
    assert step_advantages(together, [2, 2], 2, scale="none").tolist() == [[1.0, 1.0], [-1.0, 0.0]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_one_step_at_the_end_is_the_reward_of_the_outcome(scale) -> None:
    lengths, reward = [3, 5, 1, 4, 2, 2], torch.tensor([1.0, 0.0, 2.0, 0.1, 0.1, 0.1])
    steps = [[(n, r)] for n, r in zip(lengths, reward.tolist(), strict=True)]
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    outcome = group_advantages(reward.double(), 3, baseline="mean", scale=scale)
    assert torch.allclose(step_advantages(steps, lengths, 3, scale=scale), outcome[:, None] * mask, rtol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.3])
def test_equal_rewards_one_step_or_none_have_no_advantage_at_all(scale, value: float) -> None:
    equal = [[(1, value), (2, value), (5, value)], [(3, value)], [(4, value), (5, value)]]
    one, none = [[], [(2, value)], []], [[], [], []]
    advantage = step_advantages(equal + one + none, [5] * 9, 3, scale=scale)
    assert advantage.shape == (9, 5) and advantage.eq(0).all()


def test_the_split_over_ranks_changes_nothing() -> None:
    steps, lengths = ragged(5, 12, 4)
    lengths[0] = lengths[4] = lengths[8] = 12
    whole = step_advantages(steps, lengths, 4, scale="batch")
    seen: list[torch.Tensor] = []
    parts = [slice(0, 4), slice(4, 8), slice(8, 12)]
    for part in parts:
        step_advantages(steps[part], lengths[part], 4, scale="batch", total=lambda local: seen.append(local) or local)
    split = [step_advantages(steps[p], lengths[p], 4, scale="batch", total=lambda _: sum(seen)) for p in parts]
    assert torch.allclose(torch.cat(split), whole, rtol=1e-6)


def test_a_step_ends_inside_its_completion() -> None:
    for end in (0, 4):
        with pytest.raises(AssertionError):
            step_advantages([[(end, 1.0)], []], [3, 3], 2, scale="none")
