"""Weights, KL estimators, the adaptive coefficient and the correction for the sampler, each by itself."""

import math

import numpy as np
import pytest
import torch
from objective_formulas import Batch

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.grpo.controllers import adaptive_beta
from hybrid_grpo.grpo.correction import sampler_correction
from hybrid_grpo.grpo.loss import DRIFTS, KL, kl_penalty, reward_kl, token_weights

LOSS_TYPES = ["dapo", "grpo", "dr_grpo"]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_row_s_weights_depend_on_the_totals_and_not_on_its_neighbors_or_padding(loss_type):
    mask = Batch(5).mask
    totals = {"total_tokens": 1000, "total_rows": 64, "max_completion_tokens": 50}
    whole = token_weights(mask, loss_type, **totals)
    for row, weights in zip(mask, whole, strict=True):
        alone = token_weights(row[: int(row.sum())][None], loss_type, **totals)[0]
        assert torch.equal(weights[row], alone) and not weights[~row].any()


def test_weights_by_hand():
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    totals = {"total_tokens": 10, "total_rows": 4, "max_completion_tokens": 8}
    assert token_weights(mask, "dapo", **totals).sum(1).tolist() == pytest.approx([4 / 10, 1 / 10])
    assert token_weights(mask, "grpo", **totals).sum(1).tolist() == pytest.approx([1 / 4, 1 / 4])
    assert token_weights(mask, "dr_grpo", **totals).sum(1).tolist() == pytest.approx([4 / 32, 1 / 32])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("total", [0, 5])
def test_all_padding_weighs_nothing_and_is_finite(loss_type, total):
    """With totals of 0 too: a step whose completions were all cut, and are left out by mask_truncated."""
    mask = torch.zeros(2, 3, dtype=torch.bool)
    weights = token_weights(mask, loss_type, total_tokens=total, total_rows=total, max_completion_tokens=3)
    assert torch.equal(weights, torch.zeros(2, 3))


def test_estimators_are_their_formulas_and_zero_at_equality():
    x, y = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    d = (y - x).numpy()
    for estimator, expected in {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}.items():
        assert not kl_penalty(x, x, estimator).any()
        assert np.abs(kl_penalty(x, y, estimator).numpy() / expected - 1).max() < 1e-6
    assert all((kl_penalty(x, y, estimator) >= 0).all() for estimator in ("k2", "k3"))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_and_so_is_the_gradient_with_the_ratio(estimator):
    """Exactly, by summing over a vocabulary in place of sampling from it; the tokens are of another, older policy."""
    generator = torch.Generator().manual_seed(1)
    logits, ref, old = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    ref, old, p = ref.log_softmax(-1), old.log_softmax(-1), logits.log_softmax(-1)
    kl = (p.exp() * (p - ref)).sum()
    unbiased = (old.exp() * (p - old).exp() * kl_penalty(p, ref, estimator)).sum()
    assert unbiased.item() == pytest.approx(kl.item(), rel=1e-9)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (kl, unbiased)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)
    # Without the ratio it is not, even on-policy: of k1 nothing is left, k3 is the gradient of KL(reference || policy).
    (without,) = torch.autograd.grad((p.detach().exp() * kl_penalty(p, ref, estimator)).sum(), logits)
    assert torch.allclose(without, {"k1": 0.0, "k3": p.exp() - ref.exp()}[estimator] * torch.ones(50).double())


@pytest.mark.parametrize("estimator", list(KL))
def test_the_reward_s_kl_is_that_of_a_completion_s_tokens(estimator):
    batch = Batch(2)
    clean = reward_kl(batch.old, batch.ref, batch.mask, estimator)
    by_hand = [kl_penalty(batch.old[b][m], batch.ref[b][m], estimator) for b, m in enumerate(batch.mask)]
    assert torch.equal(clean[batch.mask], torch.cat(by_hand)) and not clean[~batch.mask].any()
    batch.old[~batch.mask], batch.ref[~batch.mask] = math.nan, math.inf
    assert torch.equal(reward_kl(batch.old, batch.ref, batch.mask, estimator), clean)
    assert not reward_kl(batch.old, batch.ref, torch.zeros_like(batch.mask), estimator).any()


def test_the_adaptive_coefficient_follows_ziegler():
    assert adaptive_beta(0.1, 6.0, 6.0, 10000, 256) == 0.1
    assert adaptive_beta(0.1, 6.6, 6.0, 10000, 256) == pytest.approx(0.1 * (1 + 0.1 * 256 / 10000))
    assert adaptive_beta(0.1, 5.4, 6.0, 10000, 256) == pytest.approx(0.1 * (1 - 0.1 * 256 / 10000))
    for kl, error in ((600.0, 0.2), (0.0, -0.2), (-3.0, -0.2)):
        assert adaptive_beta(0.1, kl, 6.0, 10000, 256) == pytest.approx(0.1 * (1 + error * 256 / 10000))
    assert adaptive_beta(0.1, 0.0, 6.0, 100, 10**6) == pytest.approx(0.08)
    # A KL that grows as beta falls is brought to the target and stays there.
    beta = 1.0
    for _ in range(2000):
        beta = adaptive_beta(beta, 0.01 / beta, 0.1, 10000, 256)
    assert 0.01 / beta == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
def test_equal_log_probabilities_and_empty_rows_need_no_correction(correction):
    batch, grpo = Batch(3), GrpoConfig(sampler_correction=correction)
    batch.mask[4] = False
    batch.old[4] = math.nan
    factor, numbers = sampler_correction(batch.old, batch.old, batch.mask, grpo)
    assert torch.equal(factor, batch.mask.double()) and [value for value, _ in numbers.values()] == [1, 1, 0]
    empty, numbers = sampler_correction(batch.old, batch.old, torch.zeros_like(batch.mask), grpo)
    assert not empty.any() and [(value, tokens) for value, tokens in numbers.values()] == [(0, 0)] * 3


def test_the_sign_of_a_rounding_is_no_drift():
    """Of a token that the same policy sampled, log-probabilities differ by rounding."""
    log_ratio = torch.tensor([0.0, 3e-6, -3e-6, 2e-5, 1e-3, -0.2], requires_grad=True)
    drift = DRIFTS["absolute"](log_ratio)
    drift.sum().backward()
    assert drift.tolist() == pytest.approx([0, 0, 0, 2e-5, 1e-3, 0.2])
    assert log_ratio.grad.tolist() == [0, 0, 0, 1, 1, -1]
