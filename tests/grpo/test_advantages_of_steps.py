"""From rewards of steps to advantages of tokens, in both ways, against numpy in float64."""

from itertools import product

import numpy as np
import pytest
import torch

from hybrid_grpo.data.episodes import Part
from hybrid_grpo.grpo.advantages import group_advantages, part_advantages, reward_to_go_advantages, step_advantages


def ragged(seed: int, rows: int, size: int):
    """Steps at random places of random completions; every third completion has none."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, rows).tolist()
    steps = []
    for row, length in enumerate(lengths):
        ends = sorted(rng.choice(np.arange(1, length + 1), min(length, 3), replace=False).tolist()) if row % 3 else []
        steps.append([(end, float(rng.normal(2, 3))) for end in ends])
    return steps, lengths


def coming(row, t: int, discount: float) -> float:
    """What the steps of a completion that end at or after token t earn, each discounted against the one before."""
    return sum(discount**k * reward for k, (_, reward) in enumerate(step for step in row if step[0] >= t))


def by_formula(steps, lengths, size: int, scale: str, discount: float) -> np.ndarray:
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
            scaled = [(end, (r - means[i // size]) / deviation[scale]) for end, r in row]
            advantage[i, t - 1] = coming(scaled, t, discount)
    return advantage


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("discount", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(2))
def test_agrees_with_numpy(scale, discount, seed: int) -> None:
    steps, lengths = ragged(seed, 12, 4)
    mine = step_advantages(steps, lengths, 4, scale=scale, discount=discount)
    assert mine.dtype == torch.float32
    assert np.allclose(mine.numpy(), by_formula(steps, lengths, 4, scale, discount), rtol=1e-6, atol=1e-6)


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


def test_a_step_ends_inside_its_completion() -> None:
    for end in (0, 4):
        with pytest.raises(AssertionError):
            step_advantages([[(end, 1.0)], []], [3, 3], 2, scale="none")


def to_go_by_formula(whole, steps, lengths, size: int, baseline: str, scale: str, discount: float) -> np.ndarray:
    """Token by token, of what is still to come."""
    width = max(lengths)
    to_go = np.array([[coming(row, t, discount) for t in range(1, width + 1)] for row in steps])
    centered = np.zeros((len(steps), width))
    for i in range(len(steps)):
        group = [j for j in range(i // size * size, i // size * size + size) if not np.isnan(whole[j])]
        if np.isnan(whole[i]):
            continue
        others = [j for j in group if j != i] if baseline == "leave_one_out" else group
        for t in range(width):
            centered[i, t] = whole[i] - np.mean([whole[j] for j in others])
            centered[i, t] += to_go[i, t] - np.mean([to_go[j, t] for j in others])
    widest = []
    for first in range(0, len(steps), size):
        group = [j for j in range(first, first + size) if not np.isnan(whole[j])]
        spread = [np.var([whole[j] + to_go[j, t] for j in group], ddof=1) for t in range(width)]
        widest.append((group, int(np.argmax(spread)), np.sqrt(max(spread))))
    if scale == "batch":
        squares = [centered[j, t] ** 2 for group, t, _ in widest for j in group]
        return centered / (np.sqrt(np.sum(squares) / (len(squares) - 1)) + 1e-4)
    if scale == "group":
        return centered / np.repeat([deviation + 1e-4 for _, _, deviation in widest], size)[:, None]
    return centered


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(("seed", "discount"), [(0, 1.0), (1, 0.5), (2, 0.0)])
def test_reward_to_go_agrees_with_numpy(baseline, scale, seed: int, discount) -> None:
    steps, lengths = ragged(seed, 12, 4)
    whole = np.random.default_rng(seed).normal(0, 2, 12)
    whole[5], steps[5] = np.nan, []
    given = {"baseline": baseline, "scale": scale, "discount": discount}
    mine = reward_to_go_advantages(torch.tensor(whole), steps, lengths, 4, **given)
    assert mine.dtype == torch.float32 and mine[5].eq(0).all()
    expected = to_go_by_formula(whole, steps, lengths, 4, **given)
    assert np.allclose(mine.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_reward_to_go_by_hand() -> None:
    # To go: 3, 3, 2, 0 and 1, 0, 0, 0.
    steps, lengths, whole_B = [[(2, 1.0), (3, 2.0)], [(1, 1.0)]], [4, 2], torch.zeros(2, dtype=torch.float64)
    rewards = reward_to_go_advantages(whole_B, steps, lengths, 2, baseline="mean", scale="none")
    assert rewards.tolist() == [[1.0, 1.5, 1.0, 0.0], [-1.0, -1.5, -1.0, 0.0]]
    scaled = reward_to_go_advantages(whole_B, steps, lengths, 2, baseline="mean", scale="group")
    alone = reward_to_go_advantages(whole_B, steps, lengths, 2, baseline="mean", scale="none", discount=0.0)
    assert alone.tolist() == [[0.0, 0.5, 1.0, 0.0], [0.0, -0.5, -1.0, 0.0]], "1, 1, 2, 0 and 1, 0, 0, 0"
    # Spread widest at the second token: 3 and 0, with standard deviation 3 / sqrt(2).
    assert torch.allclose(scaled, rewards / (3 / 2**0.5 + 1e-4))


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_reward_to_go_without_steps_is_the_groups_advantage(baseline, scale) -> None:
    reward_B = torch.tensor([1.0, 0.0, 2.0, 0.1, 0.1, 0.1, torch.nan, 3.0, 1.0], dtype=torch.float64)
    lengths = [3, 5, 1, 4, 2, 2, 2, 3, 4]
    expected = group_advantages(reward_B, 3, baseline=baseline, scale=scale)[:, None].expand(-1, 5)
    mine = reward_to_go_advantages(reward_B, [[] for _ in lengths], lengths, 3, baseline=baseline, scale=scale)
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_reward_to_go_of_completions_that_earned_the_same_is_exactly_zero(scale) -> None:
    steps = [[(1, 0.1), (3, 1 / 3)]] * 3 + [[]] * 3
    whole_B = torch.tensor([0.7] * 6, dtype=torch.float64)
    mine = reward_to_go_advantages(whole_B, steps, [3, 4, 5, 2, 2, 2], 3, baseline="mean", scale=scale)
    assert mine.eq(0).all()


def test_reward_to_go_tells_where_completions_of_one_sum_earned_it() -> None:
    steps, whole_B = [[(1, 1.0)], [(2, 1.0)]], torch.zeros(2, dtype=torch.float64)
    mine = reward_to_go_advantages(whole_B, steps, [2, 2], 2, baseline="mean", scale="group")
    # The first token is worth the same in both, and only one of the second ones something.
    assert torch.allclose(mine, torch.tensor([[0.0, -(0.5**0.5)], [0.0, 0.5**0.5]]), atol=1e-3)


def test_parts_are_compared_by_role() -> None:
    """White earns 1 and 3, black 4 and 0, and a role without an opponent nothing; a second group has equal rewards."""
    parts = [
        [Part("white", 1.0, ((0, 1, 1.0), (2, 3, 0.5))), Part("black", 4.0, ((1, 2, 1.0), (2, 3, 0.5)))],
        [Part("white", 3.0, ((0, 2, 1.0),)), Part("black", 0.0, ((2, 3, 1.0),)), Part("grey", 9.0, ((3, 4, 1.0),))],
        *[[Part("white", 0.1, ((0, 3, 1.0),))], []],
        *[[Part("white", 0.1, ((0, 3, 1.0),))], [Part("white", 0.1, ((0, 3, 1.0),))]],
    ]
    lengths = [3, 4, 3, 3, 3, 3]
    own = torch.zeros(6, 4)
    own[:2] = torch.tensor([[-1.0, 2.0, 0.5, 0.0], [1.0, 1.0, -2.0, 0.0]])
    assert part_advantages(parts, lengths, 2, "none").equal(own)
    seen: list[torch.Tensor] = []
    split = slice(0, 2), slice(2, 6)
    for ranks in (lambda local: seen.append(local) or local, lambda _: sum(seen)):
        found = [part_advantages(parts[of], lengths[of], 2, "batch", ranks)[:, :3] for of in split]
    # Eight rewards, of which four are not their role's mean.
    assert torch.allclose(torch.cat(found), own[:, :3] / ((10 / 7) ** 0.5 + 1e-4))


@pytest.mark.parametrize("to_go", [False, True])
def test_the_split_over_ranks_changes_nothing(to_go: bool) -> None:
    steps, lengths = ragged(5, 12, 4)
    lengths[0] = lengths[4] = lengths[8] = 12
    whole_B = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def of(part: slice, **total) -> torch.Tensor:
        given = steps[part], lengths[part], 4
        if to_go:
            return reward_to_go_advantages(whole_B[part], *given, baseline="mean", scale="batch", **total)
        return step_advantages(*given, scale="batch", **total)

    seen: list[torch.Tensor] = []
    parts = [slice(0, 4), slice(4, 8), slice(8, 12)]
    for part in parts:
        of(part, sum_over_ranks=lambda local: seen.append(local) or local)
    split = [of(part, sum_over_ranks=lambda _: sum(seen)) for part in parts]
    assert torch.allclose(torch.cat(split), of(slice(None)), rtol=1e-6)


def expected_gradient(advantages_of) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a policy that ends or goes on, twice, where the first token earns 1 and the second 3 or -2: the gradient that
    advantages make on average over all groups of two, and that of the expected reward."""
    logits = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    first, second = logits[:2].log_softmax(0), logits[2:].log_softmax(0)
    # Log-probabilities of the tokens, and rewards of the steps.
    outcomes = [
        ([first[0]], [(1, 1.0)]),
        ([first[1], second[0]], [(1, 1.0), (2, 3.0)]),
        ([first[1], second[1]], [(1, 1.0), (2, -2.0)]),
    ]
    chance = [sum(logp).exp() for logp, _ in outcomes]
    value = sum(p * sum(r for _, r in steps) for p, (_, steps) in zip(chance, outcomes, strict=True))
    (exact,) = torch.autograd.grad(value, logits, retain_graph=True)
    mean = torch.zeros(4, dtype=torch.float64)
    for group in product(range(3), repeat=2):
        steps, lengths = [outcomes[k][1] for k in group], [len(outcomes[k][0]) for k in group]
        advantage_BT = advantages_of(steps, lengths).double()
        surrogate = sum(
            advantage_BT[row, t] * logp for row, k in enumerate(group) for t, logp in enumerate(outcomes[k][0])
        )
        (gradient,) = torch.autograd.grad(surrogate / 2, logits, retain_graph=True)
        mean += (chance[group[0]] * chance[group[1]]).item() * gradient
    return mean, exact


def test_reward_to_go_has_the_gradient_of_the_expected_reward() -> None:
    def to_go(steps, lengths):
        whole_B = torch.zeros(2, dtype=torch.float64)
        return reward_to_go_advantages(whole_B, steps, lengths, 2, baseline="leave_one_out", scale="none")

    mean, exact = expected_gradient(to_go)
    assert exact.abs().max() > 0.1 and torch.allclose(mean, exact, atol=1e-6)


def test_normalized_steps_pay_for_ending_early() -> None:
    """As written in the paper: the step that may go wrong is below the mean even where it is worth taking."""
    mean, exact = expected_gradient(lambda steps, lengths: step_advantages(steps, lengths, 2, scale="none"))
    assert exact[1] > exact[0], "going on is worth it"
    assert mean[0] > mean[1], "and yet ending is what is learned"
