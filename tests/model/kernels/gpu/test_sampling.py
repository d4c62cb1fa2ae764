"""The sampling kernel: torch's tokens, and log-probabilities as float64 has them."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from distributions import assert_follows, probabilities
from gpu_kernels import DEVICE, DTYPES, cases

from hybrid_grpo.generation import categorical, stream_key
from hybrid_grpo.generation.categorical import ONE, UNIT, Filters, in_torch
from hybrid_grpo.model.kernels.gpu import sampling


def random_filters(rng):
    options = [Filters(1 / rng.uniform(0.2, 3)), Filters(least_weight=UNIT, greedy=True)]
    for top_k, top_p, min_p in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1)):
        top_k = top_k * rng.choice([1, 2, 17, 500, 10_000])
        top_p = max(1, round(ONE * rng.choice([0.0, 0.3, 0.9, 0.99]))) if top_p else ONE
        least = round(UNIT * rng.choice([1.0, 0.1, 1e-3])) if min_p else 0
        options.append(Filters(1 / rng.choice([1.0, 0.7, 1.5]), top_k, top_p, least))
    return replace(rng.choice(options), names_kept=True)


def random_logits(rng, generator, dtype):
    vocabulary = rng.choice([4097, 9000] if rng.random() < 0.05 else [1, 2, 29, 300, 1000, 1024, 1500])
    rows = rng.randint(1, 2)
    wide = rng.choice([0, 5])
    logits = rng.choice([0.1, 1, 8]) * torch.randn(rows, vocabulary + wide, generator=generator)
    kind = rng.randrange(6)
    if kind == 0:
        logits = logits.round()  # many equal ones, minus zero too
    elif kind == 1:
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = float("-inf")
    elif kind == 2:
        logits[0] = float("-inf")
        logits[0, rng.randrange(vocabulary)] = 3.0  # one token left
    elif kind == 3:
        logits[0, rng.randrange(vocabulary)] = rng.choice([float("nan"), float("inf")])
    return logits.to(DEVICE, dtype)[:, :vocabulary]


@pytest.mark.parametrize("case", cases())
def test_tokens_are_those_of_torch(case, seeded, monkeypatch):
    rng, generator = seeded(case)
    monkeypatch.setattr(sampling, "_BLOCK", rng.choice([256, sampling._BLOCK]))
    logits_nV = random_logits(rng, generator, rng.choice(DTYPES))
    filters = random_filters(rng)
    key_n = torch.randint(-(1 << 62), 1 << 62, (len(logits_nV),), generator=generator).to(DEVICE)
    counter_n = torch.arange(len(logits_nV), device=DEVICE) * 1000
    given = (logits_nV, key_n, counter_n)
    token_n, logp_n, kept_logp_n, kept_nV = sampling.sample(*given, *astuple(filters))
    torch_token_n, _, torch_kept_logp_n, torch_kept_nV = in_torch(*given, filters)
    assert torch.equal(token_n, torch_token_n) and torch.equal(kept_nV, torch_kept_nV)
    torch.testing.assert_close(kept_logp_n, torch_kept_logp_n, atol=2e-6, rtol=1e-6, equal_nan=True)
    whole = (logits_nV.double() * filters.inverse_temperature).log_softmax(-1)
    expected = whole.gather(1, token_n[:, None])[:, 0]
    torch.testing.assert_close(logp_n.double(), expected, atol=3e-6, rtol=1e-6, equal_nan=True)
    for row in range(len(logits_nV)):
        if not expected[row].isnan():
            assert token_n[row] in kept(logits_nV[row], filters)


def kept(logits_V, filters):
    """Tokens that filters keep, in float64, with those on an edge by less than rounding."""
    p = (logits_V.double() * filters.inverse_temperature).softmax(-1)
    keep = p > 0
    if filters.top_k:
        keep &= logits_V >= logits_V.sort(descending=True).values[: filters.top_k][-1]
    if filters.top_p < ONE:
        p_kept = p.where(keep, 0.0)
        more = torch.stack([p_kept[logits_V > x].sum() for x in logits_V[keep].unique()])
        before = dict(zip(logits_V[keep].unique().tolist(), more.tolist(), strict=True))
        limit = float(p_kept.sum()) * filters.top_p / ONE + 1e-6
        keep &= torch.tensor([before.get(float(x), 1.0) < limit for x in logits_V], device=p.device)
    keep &= p >= p.max() * (filters.least_weight / UNIT) * (1 - 1e-6)
    return keep.nonzero()[:, 0].tolist()


def test_tokens_follow_the_filtered_softmax():
    # The interpreter takes 10 ms for a row, and ten times that where it searches for the edge of top-k or top-p.
    draws, top_k, top_p = (60_000, 9, 0.95) if DEVICE == "cuda" else (250, 0, 1.0)
    logits_V = torch.randn(12, generator=torch.Generator().manual_seed(1))
    filters = Filters(1 / 0.8, top_k, round(top_p * ONE), UNIT // 10)
    key_n = torch.tensor([stream_key(i) for i in range(draws)], device=DEVICE)
    logits_nV = logits_V.to(DEVICE).expand(draws, -1)
    token_n, *_ = sampling.sample(logits_nV, key_n, torch.zeros_like(key_n), *astuple(filters))
    counts = np.bincount(token_n.cpu().numpy(), minlength=12)
    assert_follows(counts, probabilities(logits_V, 0.8, top_k, top_p, 0.1))


def test_a_kernel_that_disagrees_is_not_used(monkeypatch):
    def wrong(logits_nV, *_):
        return logits_nV.argmin(-1), *torch.zeros(2, len(logits_nV), device=DEVICE), None

    case = (torch.device(DEVICE), torch.bfloat16, 500, Filters(1.2, 300, ONE * 9 // 10, UNIT // 1000))
    assert categorical._kernel_agrees(*case)
    monkeypatch.setattr(sampling, "sample", wrong)
    assert not categorical._kernel_agrees(*case)
