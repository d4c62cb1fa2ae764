"""Baselines, scales, corrections and the entropy controller against their papers' definitions in numpy."""

import numpy as np
import pytest
import torch
from rank_threads import in_ranks

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.config.errors import RunStopped
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.distributed.ranks import all_reduce
from hybrid_grpo.grpo.advantages import group_advantages, token_advantages
from hybrid_grpo.grpo.baselines import path_variances
from hybrid_grpo.grpo.controllers import EntropyController
from hybrid_grpo.grpo.correction import sampler_correction
from hybrid_grpo.grpo.minibatches import Signals, correction_means
from hybrid_grpo.model.logprobs import LogitShape, squared_probabilities

NAN = float("nan")


def rollout_of(lengths, size):
    prompts = [Prompt(i, "x", [1], {}) for i in range(len(lengths) // size)]
    return Rollout(prompts, [Completion([1] * n, [-1.0] * n, "stop") for n in lengths], size)


def group_of(seed, size=6):
    """Rewards, one of them missing, and lengths."""
    stream = np.random.default_rng(seed)
    rewards = stream.integers(0, 4, size).astype(float)
    rewards[stream.integers(size)] = NAN
    return rewards, stream.integers(1, 30, size)


def by_paper(rewards, lengths, baseline):
    """Completion by completion: OPO; or what the best of a group exceeds the best of its others by."""
    has = ~np.isnan(rewards)
    advantages = np.zeros_like(rewards)
    for i in np.flatnonzero(has):
        others = [r for j, r in enumerate(rewards) if has[j] and j != i]
        advantages[i] = {
            "mean": lambda i=i: rewards[i] - rewards[has].mean(),
            "leave_one_out": lambda i=i, others=others: rewards[i] - np.mean(others or [rewards[i]]),
            "length": lambda i=i: rewards[i] - (rewards * lengths)[has].sum() / lengths[has].sum(),
            "best_other": lambda i=i, others=others: max([rewards[i], *others]) - max(others),
        }[baseline]()
    return advantages


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "length", "best_other"])
@pytest.mark.parametrize("scale", ["none", "mean", "group", "batch"])
def test_advantages_are_those_of_the_papers(baseline, scale):
    groups = [group_of(seed) for seed in range(20)]
    groups[-1][0][:] += 100.0  # a group far away, which no deviation may see
    rewards, lengths = (torch.from_numpy(np.concatenate(part).astype(float)) for part in zip(*groups, strict=True))
    ours = group_advantages(rewards, 6, baseline=baseline, scale=scale, weight_B=lengths).view(-1, 6)
    assert ours.dtype == torch.float32
    every = np.concatenate([by_paper(*group, baseline)[~np.isnan(group[0])] for group in groups])
    batch = np.sqrt(np.square(every).sum() / (len(every) - 1)) + 1e-4
    for mine, (reward, length) in zip(ours.numpy(), groups, strict=True):
        expected = by_paper(reward, length, baseline)
        there = reward[~np.isnan(reward)]
        if np.ptp(there) == 0:
            assert not mine.any()
            continue
        # MaxRL: (r - mean) / mean.
        expected /= {"none": 1.0, "mean": there.mean(), "group": there.std(ddof=1) + 1e-4, "batch": batch}[scale]
        assert np.allclose(mine, expected, rtol=1e-6, atol=1e-9)


def test_maxrl_weighs_a_group_by_the_inverse_of_its_pass_rate_and_turns_no_sign_around():
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, -1, -1, -3, -3, 0, 0, 0, 0])
    ours = group_advantages(rewards, 4, baseline="mean", scale="mean").view(4, 4)
    assert ours[0].tolist() == [3.0, -1.0, -1.0, -1.0]
    assert ours[1].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    assert ours[2].tolist() == [0.5, 0.5, -0.5, -0.5] and not ours[3].any()


def advantages_of(rollout, rewards, variance_BT, steps=None, **grpo):
    scores = Scores(rewards, {}, {}, steps=steps)
    given = GrpoConfig(**grpo), 64, {}, None, 0.0, lambda x: x
    return token_advantages(rollout, scores, *given, variance_BT)[0]


@pytest.mark.parametrize("of_steps", [False, True])
def test_the_optimal_token_baseline_is_that_of_its_paper(of_steps):
    """B_t = sum of W_t G_t / sum of W_t over the completions that have a token t, and A_t = G_t - B_t."""
    stream, size, width = np.random.default_rng(0), 5, 9
    lengths = stream.integers(1, width + 1, 2 * size)
    lengths[0] = width
    rollout = rollout_of(lengths.tolist(), size)
    mask = rollout.mask_BT
    logp, squares = (torch.from_numpy(-stream.random((2 * size, width)) * 3) for _ in range(2))
    squares = logp.exp().square() + squares.exp() * 0.1
    variance = path_variances(logp, squares, mask)
    earned = stream.integers(0, 2, 2 * size).astype(float)
    steps = [[(max(1, n // 2), 1.0), (n, 2.0)] if n > 1 else [(1, 3.0)] for n in lengths.tolist()] if of_steps else None
    ours = advantages_of(rollout, torch.from_numpy(earned), variance, steps, baseline="optimal", scale_rewards="none")
    w = np.cumsum((1 - 2 * np.exp(logp) + squares).numpy() * mask.numpy(), 1)
    for row, t in np.argwhere(mask.numpy()):
        group = [i for i in range(row // size * size, row // size * size + size) if lengths[i] > t]

        def to_go(i, t=t):
            return earned[i] + sum(value for end, value in (steps or [[]] * 10)[i] if end > t)

        base = sum(w[i, t] * to_go(i) for i in group) / sum(w[i, t] for i in group)
        assert ours[row, t].item() == pytest.approx(to_go(row) - base, rel=1e-6, abs=1e-6)
    equal = advantages_of(rollout, torch.full((10,), 0.1).double(), variance, baseline="optimal")
    assert not equal.any()


def test_best_other_is_refused_for_rewards_of_steps():
    rollout, steps = rollout_of([3, 2], 2), [[(1, 1.0), (3, 0.0)], [(2, 1.0)]]
    with pytest.raises(RunStopped, match=r"grpo\.baseline best_other is not defined for rewards of steps: set it to"):
        advantages_of(rollout, torch.zeros(2).double(), None, steps, baseline="best_other")


def test_the_head_gives_the_squared_norm_of_the_gradient_with_respect_to_the_logits(monkeypatch):
    """1 - 2 p + q is || onehot - softmax ||^2, with scale, soft cap and temperature, in tiles of a few rows."""
    monkeypatch.setattr("hybrid_grpo.model.logprobs.TILE_BYTES", 4 * 31 * 3)
    draw = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=draw) for shape in ((11, 8), (31, 8), (31,)))
    shape, targets = LogitShape(0.7, 5.0), torch.randint(31, (11,), generator=draw)
    (square,) = squared_probabilities(hidden, weight, bias, shape, 0.8)
    logits = (shape(hidden @ weight.T + bias) / 0.8).double().requires_grad_()
    logp = logits.log_softmax(1)[torch.arange(11), targets]
    (gradient,) = torch.autograd.grad(logp.sum(), logits)
    assert torch.allclose(1 - 2 * logp.exp() + square, gradient.square().sum(1), rtol=1e-5)


@pytest.mark.parametrize("low, high", [(None, 2.0), (0.5, 5.0), (0.9, 1.1)])
@pytest.mark.parametrize("correction", ["none", "truncate", "sequence", "band", "mask"])
def test_corrections_are_their_formulas(correction, low, high):
    draw = torch.Generator().manual_seed(0)
    old, sampler = (torch.randn(6, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(4) < torch.tensor([4, 1, 2, 3, 4, 2])[:, None]
    sampler[~mask] = NAN
    given = {} if correction == "none" else {"sampler_ratio_max": high, "sampler_ratio_min": low}
    factor, numbers = sampler_correction(old, sampler, mask, GrpoConfig(sampler_correction=correction, **given))
    bottom = low if low is not None else 0.0 if correction in ("truncate", "sequence") else 1 / high
    ratios = []
    for row, real in enumerate(mask):
        r = (old[row] - sampler[row])[real].exp().numpy()
        whole = {"sequence": np.prod(r), "mask": np.prod(r) ** (1 / len(r))}
        r = whole[correction] + 0 * r if correction in whole else r
        within = (r >= bottom) & (r <= high)
        by_name = {"none": np.ones_like(r), "band": np.where(within, r, 0.0), "mask": within.astype(float)}
        expected = by_name.get(correction, np.clip(r, bottom, high))
        ratios.append(r)
        assert np.allclose(factor[row][real].numpy(), expected, rtol=1e-9, atol=0)
        assert not factor[row][~real].any()
    r = np.concatenate(ratios)
    cut = np.zeros_like(r) if correction == "none" else (r < bottom) | (r > high)
    assert [value.item() for value, _ in numbers.values()] == pytest.approx([r.mean(), r.max(), cut.mean()], rel=1e-7)
    assert {int(tokens) for _, tokens in numbers.values()} == {int(mask.sum()), 1}
    assert cut.any() or correction == "none"


def test_self_normalized_weights_have_mean_one_over_the_tokens_of_all_ranks():
    grpo = GrpoConfig(sampler_correction="truncate", sampler_normalize=True)
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 4, 5, generator=draw) for _ in range(3)]
    masks = [torch.rand(4, 5, generator=draw) < 0.7 for _ in parts]
    minibatches = [[0, 1], [2, 3]]

    def means(rank):
        sampler, old = parts[rank]
        return correction_means(Signals(sampler, old, None, old), masks[rank], minibatches, grpo, all_reduce)

    found = in_ranks(3, means)
    assert found[0] == found[1] == found[2]
    for rows, mean in zip(minibatches, found[0], strict=True):
        factors = [
            sampler_correction(old, sampler, mask, grpo)[0][rows][mask[rows]]
            for (sampler, old), mask in zip(parts, masks, strict=True)
        ]
        assert (torch.cat(factors) / mean).mean().item() == pytest.approx(1.0, rel=1e-6)


def test_the_entropy_controller_follows_skywork_and_goes_on_after_a_resume():
    grpo = GrpoConfig(entropy_target=0.5, entropy_coef=0.01, entropy_step=0.004)
    controller = EntropyController(grpo, torch.device("cpu"))
    coefficients = [controller.settings.entropy_coef]
    for entropy in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.4):
        for share in (0.5, 1.5):
            controller.add({"policy/entropy": (torch.tensor(entropy * share), 10)})
        controller.update(all_reduce)
        coefficients.append(controller.settings.entropy_coef)
        again = EntropyController(grpo, torch.device("cpu"))
        again.load_state_dict(controller.state_dict())
        assert again.settings == controller.settings
    # Grows at or below the target; above it it falls and is not used; it never falls below 0.
    assert coefficients == pytest.approx([0.01, 0.014, 0.018, 0, 0, 0, 0, 0.006])
    fixed = GrpoConfig(entropy_coef=0.01)
    assert EntropyController(fixed, torch.device("cpu")).settings is fixed
