"""The loss against the papers' formulas, gradients included, and the laws that training relies on."""

import itertools
import math

import pytest
import torch
from objective_formulas import Batch, by_paper

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.grpo.correction import sampler_correction
from hybrid_grpo.grpo.loss import kl_penalty, policy_loss

LOSS_TYPES = ["dapo", "grpo", "dr_grpo"]
SURROGATES = [
    {"surrogate": "clip"},
    {"surrogate": "clip", "dual_clip": 1.5},
    {"surrogate": "clip", "epsilon_low": 0.1, "epsilon_high": 3.0},
    {"surrogate": "clip", "epsilon_low": 0.9, "epsilon_high": 0.05},
    {"surrogate": "cispo"},
]
KLS = [{}, *({"kl_estimator": k, "kl_unbiased": unbiased} for k in ("k1", "k2", "k3") for unbiased in (False, True))]


def unchecked(**options):
    """An objective that the settings may refuse: the formulas hold for it all the same."""
    grpo = object.__new__(GrpoConfig)
    vars(grpo).update(vars(GrpoConfig()) | options)
    return grpo


FAMILY = [
    unchecked(**{"epsilon_high": 0.3, "loss_type": loss_type, "importance": importance} | surrogate)
    for loss_type, importance, surrogate in itertools.product(LOSS_TYPES, ["token", "sequence"], SURROGATES)
]


DAPO = FAMILY[: len(FAMILY) // len(LOSS_TYPES)]


def name(options):
    options = vars(options) if isinstance(options, GrpoConfig) else options
    default = vars(unchecked(epsilon_high=0.3))
    return "-".join(str(value) for key, value in options.items() if value != default[key]) or "default"


def family(test):
    return pytest.mark.parametrize("grpo", FAMILY, ids=name)(test)


@family
@pytest.mark.parametrize("kl", KLS, ids=name)
def test_value_and_gradient_are_those_of_the_formula(grpo, kl):
    grpo, beta = unchecked(**vars(grpo) | kl), 0.3 if kl else 0.0
    batch = Batch(seed=3)
    value, gradient = by_paper(batch, grpo, beta)
    # Weights are float32: their rounding counts against terms near 1, whatever the sum cancels to.
    assert batch.loss(grpo, beta)[0].item() == pytest.approx(value, rel=1e-6, abs=2e-7)
    assert (batch.gradient(grpo, beta) - gradient).abs().max() < 1e-6 * gradient.abs().max()


@family
def test_advantages_of_tokens_corrections_and_entropy_enter_as_the_formula_says(grpo):
    grpo = unchecked(**vars(grpo) | {"entropy_coef": 0.2})
    batch = Batch(seed=4, process=True)
    given = {"correction_bT": batch.correction}
    value, gradient = by_paper(batch, grpo, 0.05, corrected=True)
    assert batch.loss(grpo, **given)[0].item() == pytest.approx(value, rel=1e-6, abs=2e-7)
    assert (batch.gradient(grpo, **given) - gradient).abs().max() < 1e-6 * gradient.abs().max()
    entropy = batch.entropy.clone().requires_grad_()
    (slope,) = torch.autograd.grad(batch.loss(grpo, entropy_bT=entropy)[0], entropy)
    assert torch.equal(slope, -0.2 * batch.weights(grpo.loss_type))


@family
def test_no_advantage_and_no_kl_are_exactly_no_gradient(grpo):
    batch = Batch(3)
    batch.advantages.zero_()
    assert not batch.gradient(grpo, 0.0, correction_bT=batch.correction).any()
    loss, stats = batch.loss(grpo, 0.0)
    assert (loss, stats.clipped_low, stats.clipped_high) == (0, 0, 0)
    assert batch.gradient(grpo, 0.1).any()


@family
def test_splitting_into_micro_batches_and_their_order_change_nothing(grpo):
    grpo = unchecked(**vars(grpo) | {"entropy_coef": 0.1})
    batch = Batch(4)
    whole, stats = batch.loss(grpo)
    gradient = batch.gradient(grpo)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    for parts in ([slice(0, 4), slice(4, 9)], [slice(i, i + 1) for i in range(9)], [order], order.split(2)):
        pieces = [batch.loss(grpo, rows=part) for part in parts]
        assert sum(loss.item() for loss, _ in pieces) == pytest.approx(whole.item(), rel=1e-6)
        summed = sum(batch.gradient(grpo, rows=part) for part in parts)
        assert torch.allclose(summed, gradient, rtol=1e-6, atol=1e-12)
        for name in ("tokens", "kl", "clipped_low", "clipped_high"):
            assert sum(getattr(s, name) for _, s in pieces).item() == pytest.approx(getattr(stats, name).item())
        assert max(s.ratio_max for _, s in pieces) == stats.ratio_max


@family
@pytest.mark.parametrize("content", [0.0, -1e4, 1e30, math.inf, -math.inf, math.nan])
def test_what_stands_in_padding_changes_nothing(grpo, content):
    grpo = unchecked(**vars(grpo) | {"entropy_coef": 0.1, "kl_unbiased": True})
    batch = Batch(6)
    expected, stats = batch.loss(grpo, correction_bT=batch.correction)
    gradient = batch.gradient(grpo, correction_bT=batch.correction)
    for tensor in (batch.logp, batch.old, batch.ref, batch.advantages, batch.entropy, batch.correction):
        tensor[~batch.mask] = content
    loss, others = batch.loss(grpo, correction_bT=batch.correction)
    assert loss == expected and vars(others) == vars(stats)
    assert torch.equal(batch.gradient(grpo, correction_bT=batch.correction), gradient)
    assert not gradient[~batch.mask].any()


@pytest.mark.parametrize("grpo", DAPO, ids=name)
def test_a_row_of_weight_zero_has_no_part(grpo):
    """What mask_truncated drops."""
    batch, without = Batch(5), Batch(5)
    kept = torch.arange(9) != 2
    batch.mask[2] = False
    for field in ("mask", "old", "logp", "ref", "advantages", "entropy"):
        setattr(without, field, getattr(without, field)[kept])
    (loss, stats), (expected, others) = batch.loss(grpo), without.loss(grpo)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and stats.tokens == others.tokens
    assert stats.ratio_max == others.ratio_max and not batch.gradient(grpo)[2].any()


@pytest.mark.parametrize("ratio, advantage, gain, slope", [
    # Inside both bounds: the policy gradient.
    (1.25, 1.0, 1.25, 1.25),
    (0.75, -1.0, -0.75, -0.75),
    # Beyond a bound in the advantage's direction: nothing more to gain.
    (1.5, 2.0, 1.3 * 2, 0.0),
    (0.5, -2.0, -0.6 * 2, 0.0),
    # Beyond a bound against it: the full ratio pulls back.
    (0.5, 2.0, 0.5 * 2, 0.5 * 2),
    (1.5, -2.0, -1.5 * 2, -1.5 * 2),
    # Between 1 + low and 1 + high, and between 1 - high and 1 - low: the bounds are not each other's.
    (1.35, 1.0, 1.3, 0.0),
    (0.65, -1.0, -0.65, -0.65),
    # Beyond the dual clip, which is for negative advantages alone.
    (4.0, -2.0, -3.0 * 2, 0.0),
    (4.0, 2.0, 1.3 * 2, 0.0),
    (2.9, -2.0, -2.9 * 2, -2.9 * 2),
])  # fmt: skip
@pytest.mark.parametrize("importance", ["token", "sequence"])
def test_the_bounds_hold_each_on_its_side(importance, ratio, advantage, gain, slope):
    logp = torch.full((1, 2), math.log(ratio), dtype=torch.float64, requires_grad=True)
    two = torch.ones(1, 2, dtype=torch.float64)
    grpo = unchecked(importance=importance, epsilon_low=0.4, epsilon_high=0.3, dual_clip=3.0)
    loss, stats = policy_loss(logp, torch.zeros_like(two), advantage * two, two / 2, grpo, beta=0.0)
    loss.backward()
    assert -loss.item() == pytest.approx(gain)
    assert (-logp.grad * 2).flatten().tolist() == pytest.approx([slope, slope])
    assert stats.clipped_high.item() == 2 * (ratio > 1.3 and advantage > 0)
    assert stats.clipped_low.item() == 2 * (ratio < 0.6 and advantage < 0)


def test_statistics_count_real_tokens():
    batch = Batch(7)
    _, stats = batch.loss(unchecked(epsilon_high=0.3))
    ratio = (batch.logp - batch.old).exp()
    positive, negative = batch.advantages > 0, batch.advantages < 0
    assert stats.tokens == batch.mask.sum()
    assert stats.clipped_high == (batch.mask & positive & (ratio > 1.3)).sum() > 0
    assert stats.clipped_low == (batch.mask & negative & (ratio < 0.8)).sum() > 0
    assert stats.ratio_max == ratio[batch.mask].max()
    assert stats.kl.item() == pytest.approx(kl_penalty(batch.logp, batch.ref, "k3")[batch.mask].sum().item())
    batch.logp = batch.old - 0.5
    assert batch.loss(unchecked())[1].ratio_max.item() == pytest.approx(math.exp(-0.5))


@pytest.mark.parametrize("options, beta", [({"kl_in": "reward"}, 0.1), ({}, 0.0)])
def test_a_kl_outside_the_loss_is_measured_and_no_more(options, beta):
    batch = Batch(8)
    loss, stats = batch.loss(unchecked(**options), beta)
    assert torch.equal(loss, batch.loss(unchecked(), 0.0, ref_logp_bT=None)[0])
    assert stats.kl > 0 and batch.loss(unchecked(), 0.0, ref_logp_bT=None)[1].kl == 0


def test_a_term_without_its_tensor_is_our_mistake():
    batch = Batch(8)
    with pytest.raises(AssertionError, match="ref_logp"):
        batch.loss(unchecked(), 0.1, ref_logp_bT=None)
    with pytest.raises(AssertionError, match="entropy"):
        batch.loss(unchecked(entropy_coef=0.1), entropy_bT=None)


def test_a_mean_ratio_at_the_bounds_of_the_correction_is_not_dropped():
    """Of one token each, so that every row's mean ratio is its token's."""
    log_ratio_bT = torch.tensor([[math.log(2.0)], [-math.log(2.0)], [0.8], [-0.8]])
    assert log_ratio_bT[:2].exp().flatten().tolist() == [2.0, 0.5]
    mask_bT, zero_bT = torch.ones(4, 1, dtype=torch.bool), torch.zeros(4, 1)
    grpo = GrpoConfig(sampler_correction="mask", sampler_ratio_max=2.0)
    factor_bT, numbers = sampler_correction(log_ratio_bT, zero_bT, mask_bT, grpo)
    assert factor_bT.flatten().tolist() == [1.0, 1.0, 0.0, 0.0] and numbers["parity/corrected_frac"][0] == 0.5
    _, alone = sampler_correction(log_ratio_bT[2:3], zero_bT[:1], mask_bT[:1], grpo)
    assert alone["parity/corrected_frac"][0] == 1.0
