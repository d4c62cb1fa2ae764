import math

import numpy as np
import pytest
import torch

from hybrid_grpo.objective import LOG_RATIO_LIMIT, k3, policy_loss, token_weights

LOSS_TYPES = ["dapo", "grpo", "dr_grpo"]
LIMIT = 13


class Batch:
    """Ragged random rows in float64, with ratios well on both sides of both bounds."""

    def __init__(self, seed=0, rows=9, tokens=LIMIT):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
        lengths[0] = tokens
        self.mask = torch.arange(tokens) < lengths[:, None]
        self.old = -randn(rows, tokens).abs()
        self.logp = self.old + 0.4 * randn(rows, tokens)
        self.ref = self.logp + 0.7 * randn(rows, tokens)
        self.advantages = randn(rows)
        self.advantages[-1] = 0.0

    def weights(self, loss_type):
        return token_weights(
            self.mask,
            loss_type,
            total_tokens=int(self.mask.sum()),
            total_rows=len(self.mask),
            max_completion_tokens=LIMIT,
        ).double()

    def loss(self, loss_type="dapo", rows=slice(None), logp=None, **options):
        """Loss and statistics of some rows, at the weights of the whole batch."""
        options = {"epsilon_low": 0.2, "epsilon_high": 0.3, "beta": 0.05, "ref_logp_bT": self.ref[rows]} | options
        logp = self.logp if logp is None else logp
        weights = self.weights(loss_type)[rows]
        return policy_loss(logp[rows], self.old[rows], self.advantages[rows], weights, **options)

    def gradient(self, *args, **options):
        logp = self.logp.clone().requires_grad_()
        loss, _ = self.loss(*args, logp=logp, **options)
        return torch.autograd.grad(loss, logp)[0]


def by_formula(batch, loss_type, low, high, beta):
    """Value and gradient, token by token, as the papers write them."""
    value, gradient = 0.0, np.zeros(batch.logp.shape)
    rows = [row.nonzero()[:, 0].tolist() for row in batch.mask]
    everything = sum(map(len, rows))
    for b, real in enumerate(rows):
        weight = {"dapo": 1 / everything, "grpo": 1 / (len(rows) * len(real)), "dr_grpo": 1 / (len(rows) * LIMIT)}
        w, advantage = weight[loss_type], float(batch.advantages[b])
        for t in real:
            ratio = math.exp(batch.logp[b, t] - batch.old[b, t])
            clipped = min(max(ratio, 1 - low), 1 + high)
            distance = float(batch.ref[b, t] - batch.logp[b, t])
            value -= w * min(ratio * advantage, clipped * advantage)
            value += w * beta * (math.exp(distance) - distance - 1)
            # The clipped branch is constant; d k3 / d logp = 1 - exp(distance).
            if ratio * advantage <= clipped * advantage:
                gradient[b, t] -= w * ratio * advantage
            gradient[b, t] += w * beta * (1 - math.exp(distance))
    return value, gradient


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.1, 3.0), (0.9, 0.05)])
@pytest.mark.parametrize("beta", [0.0, 0.04, 1.5])
def test_value_and_gradient_are_those_of_the_formula(loss_type, low, high, beta):
    for seed in range(5):
        batch = Batch(seed)
        value, gradient = by_formula(batch, loss_type, low, high, beta)
        options = {"epsilon_low": low, "epsilon_high": high, "beta": beta}
        loss, _ = batch.loss(loss_type, **options)
        # Weights are float32: their rounding counts against terms near 1, whatever the sum cancels to.
        assert loss.item() == pytest.approx(value, rel=1e-6, abs=2e-7)
        mine = batch.gradient(loss_type, **options).numpy()
        assert np.abs(mine - gradient).max() < 1e-6 * np.abs(gradient).max()


def test_the_gradient_is_that_of_finite_differences():
    batch, step = Batch(1), 1e-6
    gradient = batch.gradient("grpo")
    for b, t in [(0, 0), (0, 5), (3, 0), (7, 0), (8, 0)]:
        ends = []
        for sign in (1, -1):
            logp = batch.logp.clone()
            logp[b, t] += sign * step
            ends.append(batch.loss("grpo", logp=logp)[0].item())
        assert gradient[b, t].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_ratio_one_gives_the_gradient_of_reinforce(loss_type):
    batch = Batch(2)
    batch.logp = batch.old.clone()
    reinforce = -batch.weights(loss_type) * batch.advantages[:, None]
    assert torch.allclose(batch.gradient(loss_type, beta=0.0), reinforce, rtol=0, atol=1e-15)


def test_no_advantage_and_no_kl_are_exactly_no_gradient():
    batch = Batch(3)
    batch.advantages.zero_()
    assert not batch.gradient(beta=0.0).any()
    assert batch.loss(beta=0.0)[0] == 0
    assert batch.gradient(beta=0.1).any()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_splitting_into_micro_batches_changes_nothing(loss_type):
    batch = Batch(4)
    whole, stats = batch.loss(loss_type)
    gradient = batch.gradient(loss_type)
    for parts in ([slice(0, 4), slice(4, 9)], [slice(i, i + 1) for i in range(9)]):
        pieces = [batch.loss(loss_type, part) for part in parts]
        assert sum(loss.item() for loss, _ in pieces) == pytest.approx(whole.item(), rel=1e-6)
        summed = sum(batch.gradient(loss_type, part) for part in parts)
        assert torch.allclose(summed, gradient, rtol=1e-6, atol=1e-12)
        for name in ("tokens", "kl", "clipped_low", "clipped_high"):
            assert sum(getattr(s, name) for _, s in pieces).item() == pytest.approx(getattr(stats, name).item())
        assert max(s.ratio_max for _, s in pieces) == stats.ratio_max


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_row_s_weights_depend_on_the_totals_and_not_on_its_neighbours_or_padding(loss_type):
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
def test_an_all_padding_row_weighs_nothing_and_is_finite(loss_type):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    weights = token_weights(mask, loss_type, total_tokens=5, total_rows=2, max_completion_tokens=3)
    assert torch.equal(weights, torch.zeros(2, 3))


@pytest.mark.parametrize("content", [0.0, -1e4, 1e4, 37.0])
def test_what_stands_in_padding_changes_nothing(content):
    batch = Batch(6)
    expected, stats = batch.loss()
    gradient = batch.gradient()
    for tensor, value in ((batch.logp, content), (batch.old, -content), (batch.ref, content / 2)):
        tensor[~batch.mask] = value
    loss, others = batch.loss()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(batch.gradient(), gradient, rtol=0, atol=1e-15)
    assert all(getattr(stats, name) == getattr(others, name) for name in ("tokens", "clipped_low", "clipped_high"))
    assert others.ratio_max == stats.ratio_max and others.kl.item() == pytest.approx(stats.kl.item())


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        # Inside both bounds: the policy gradient.
        (1.25, 1.0, -1.25, -1.25),
        (0.75, -1.0, 0.75, 0.75),
        # Beyond a bound in the advantage's direction: nothing more to gain.
        (1.5, 2.0, -1.3 * 2, 0.0),
        (0.5, -2.0, 0.6 * 2, 0.0),
        # Beyond a bound against it: the full ratio pulls back.
        (0.5, 2.0, -0.5 * 2, -0.5 * 2),
        (1.5, -2.0, 1.5 * 2, 1.5 * 2),
        # Between 1 + low and 1 + high, and between 1 - high and 1 - low: the bounds are not each other's.
        (1.35, 1.0, -1.3, 0.0),
        (0.65, -1.0, 0.65, 0.65),
    ],
)
def test_the_two_bounds_hold_each_on_its_side(ratio, advantage, value, slope):
    logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, dtype=torch.float64)
    loss, stats = policy_loss(
        logp, torch.zeros_like(one), advantage * one[0], one, epsilon_low=0.4, epsilon_high=0.3, beta=0.0
    )
    loss.backward()
    assert loss.item() == pytest.approx(value)
    assert logp.grad.item() == pytest.approx(slope)
    assert stats.clipped_high.item() == (slope == 0 and advantage > 0)
    assert stats.clipped_low.item() == (slope == 0 and advantage < 0)


def test_statistics_count_real_tokens():
    batch = Batch(7)
    _, stats = batch.loss(epsilon_low=0.2, epsilon_high=0.3)
    ratio = (batch.logp - batch.old).exp()
    positive = batch.advantages[:, None] > 0
    negative = batch.advantages[:, None] < 0
    assert stats.tokens == batch.mask.sum()
    assert stats.clipped_high == (batch.mask & positive & (ratio > 1.3)).sum() > 0
    assert stats.clipped_low == (batch.mask & negative & (ratio < 0.8)).sum() > 0
    assert stats.ratio_max == ratio[batch.mask].max()
    assert stats.kl.item() == pytest.approx(k3(batch.logp, batch.ref)[batch.mask].sum().item())


def test_k3_is_zero_at_equality_never_negative_and_an_unbiased_estimate_of_the_kl():
    x, y = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    assert not k3(x, x).any() and (k3(x, y) >= 0).all()
    d = (y - x).numpy()
    assert np.abs(k3(x, y).numpy() / (np.exp(d) - d - 1) - 1).max() < 1e-6
    # Its mean under the policy is the KL exactly: sum p (q / p - log(q / p) - 1) = KL(p || q).
    p, q = torch.randn(2, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(-1)
    assert (p.exp() * k3(p, q)).sum().item() == pytest.approx((p.exp() * (p - q)).sum().item(), rel=1e-9)


@pytest.mark.parametrize("advantage", [3.0, -3.0])
@pytest.mark.parametrize("gap", [30.0, 200.0, 1e4, 1e30])
@pytest.mark.parametrize("sign", [1, -1])
def test_enormous_log_ratios_stay_finite(advantage, gap, sign):
    logp = torch.full((1, 2), -2.0, requires_grad=True)
    other = logp.detach() + sign * gap
    loss, stats = policy_loss(
        logp,
        other,
        torch.tensor([advantage]),
        torch.full((1, 2), 0.5),
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.1,
        ref_logp_bT=other,
    )
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all()
    assert stats.ratio_max <= math.exp(LOG_RATIO_LIMIT) * (1 + 1e-6) and stats.kl.isfinite()


def test_a_kl_term_without_a_reference_is_our_mistake():
    batch = Batch(8)
    with pytest.raises(AssertionError, match="ref_logp"):
        batch.loss(ref_logp_bT=None)
