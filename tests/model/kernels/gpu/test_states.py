"""One new token through layers with a state, by Triton kernels: against transformers' functions in float64."""

from unittest import mock

import pytest
import torch
from gpu_kernels import DEVICE, DTYPES, cases
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from hybrid_grpo.model.kernels import states
from hybrid_grpo.model.kernels.gpu import launcher

pytestmark = pytest.mark.usefixtures("as_on_gpu")


@pytest.fixture
def as_on_gpu():
    with mock.patch.object(launcher, "on_gpu", lambda _: True):
        yield


def exactly(function, *given, **named):
    """What transformers' function returns in float64: its own casts to float32 are left out."""
    original = getattr(function, "replaces", function)
    to = torch.Tensor.to
    wide = [x.double() if isinstance(x, torch.Tensor) else x for x in given]
    named = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in named.items()}

    def unless_narrower(self, *kinds, **more):
        return to(self, *(torch.float64 if kind == torch.float32 else kind for kind in kinds), **more)

    with (
        mock.patch.object(torch.Tensor, "to", unless_narrower),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        return original(*wide, **named), wide


def assert_close(out, expected, roundings):
    bound = roundings * torch.finfo(out.dtype).eps * expected.abs().clamp(min=expected.abs().mean())
    gap = (out.double() - expected).abs()
    assert (gap <= bound).all(), float((gap / bound).max())


def apart(generator, dtype, n, *widths):
    """Parts of wider rows, as layers split what they project."""
    mixed = torch.randn(n, 1, sum(widths), generator=generator).to(DEVICE, dtype)
    return mixed.split(widths, dim=-1)


@pytest.mark.parametrize("case", cases())
def test_convolution(case, seeded):
    rng, generator = seeded(case)
    dtype, n, channels, size = rng.choice(DTYPES), rng.randint(1, 5), rng.choice([1, 7, 256, 300]), rng.randint(1, 5)
    (x, _), more = apart(generator, dtype, n, channels, 3), {"generator": generator}
    pool = torch.randn(n + 2, channels, size, **more).to(DEVICE, dtype)
    state, behind = pool[:n], pool[n:].clone()
    weight, bias = (
        torch.randn(channels, size, **more).to(DEVICE, dtype),
        torch.randn(channels, **more).to(DEVICE, dtype),
    )
    x, more = x.transpose(1, 2), (weight, rng.choice([None, bias]), rng.choice([None, "silu"]))

    expected, (_, windows, *_) = exactly(qwen.causal_conv1d_update, x, state, *more)
    out = states.causal_conv1d_update(x, state, *more)
    assert out.shape == (n, channels, 1) and torch.equal(state.double(), windows) and torch.equal(pool[n:], behind)
    assert_close(out, expected, 8)


@pytest.mark.parametrize("case", cases())
def test_delta_rule(case, seeded):
    rng, generator = seeded(case)
    dtype, n, by_channel = rng.choice(DTYPES), rng.randint(1, 4), rng.random() < 0.4
    key_heads, dk, dv = rng.randint(1, 3), rng.choice([3, 16, 100, 128]), rng.choice([1, 20, 64, 128])
    heads = key_heads * (1 if by_channel else rng.choice([1, 2, 3]))
    parts = apart(generator, dtype, n, key_heads * dk, key_heads * dk, heads * dv)
    query, key, value = (part.unflatten(-1, (-1, d)) for part, d in zip(parts, (dk, dk, dv), strict=True))
    shape = (n, 1, heads, dk) if by_channel else (n, 1, heads)
    log_decay = -torch.rand(shape, generator=generator).to(DEVICE) * rng.choice([0.01, 1, 30])
    beta = torch.rand(n, 1, heads, generator=generator).to(DEVICE, dtype)
    pool = torch.randn(n + 1, heads, dk, dv, generator=generator).to(DEVICE)
    state, behind = pool[:n], pool[n:].clone()
    rule = kimi.recurrent_kimi_delta_attention if by_channel else qwen.torch_recurrent_gated_delta_rule

    named = {"g": log_decay, "beta": beta, "initial_state": state, "output_final_state": True}
    (expected, after), _ = exactly(rule, query, key, value, **named, use_qk_l2norm_in_kernel=True)
    out = states.recurrent_delta_rule(query, key, value, log_decay, beta, state, unit=True)
    assert out.dtype == dtype and torch.equal(pool[n:], behind)
    assert_close(out, expected, 2 if dtype != torch.float32 else 100)
    assert_close(state, after, 100)


@pytest.mark.parametrize("case", cases())
def test_mamba_1(case, seeded):
    rng, generator = seeded(case)
    dtype, n, channels, size = rng.choice(DTYPES), rng.randint(1, 4), rng.choice([1, 40, 300]), rng.choice([3, 16])
    x, b, c = (part[:, 0] for part in apart(generator, dtype, n, channels, size, size))
    step = torch.rand(n, channels, generator=generator).to(DEVICE, dtype)
    a = -torch.rand(channels, size, generator=generator).to(DEVICE)
    skip = rng.choice([None, torch.randn(channels, generator=generator).to(DEVICE)])
    pool = torch.randn(n + 1, channels, size, generator=generator).to(DEVICE)
    state, behind = pool[:n], pool[n:].clone()

    expected, (after, *_) = exactly(jamba.mamba_selective_state_update, state, x, step, a, b, c, skip)
    per_row = [t[:, None] for t in (state, x, step, b, c)]
    skips = skip if skip is None else skip[None]
    out = states.state_space_update(*per_row[:3], a[None], *per_row[3:], skips)[:, 0]
    assert out.dtype == dtype and torch.equal(pool[n:], behind)
    assert_close(out, expected, 2 if dtype != torch.float32 else 100)
    assert_close(state, after, 100)


@pytest.mark.parametrize("case", cases())
def test_mamba_2(case, seeded):
    rng, generator = seeded(case)
    dtype, n, groups = rng.choice(DTYPES), rng.randint(1, 4), rng.randint(1, 2)
    d, size = rng.choice([5, 64]), rng.choice([3, 17, 128])
    heads = groups * rng.randint(1, 3)
    x, b, c = (part[:, 0] for part in apart(generator, dtype, n, heads * d, groups * size, groups * size))
    x, b, c = x.unflatten(1, (heads, d)), b.unflatten(1, (groups, size)), c.unflatten(1, (groups, size))
    step = torch.rand(n, heads, 1, generator=generator).to(DEVICE, dtype).expand(-1, -1, d)
    a = (-torch.rand(heads, generator=generator)).to(DEVICE)[:, None, None].expand(-1, d, size)
    skip = rng.choice([None, torch.randn(heads, generator=generator).to(DEVICE)[:, None].expand(-1, d)])
    pool = torch.randn(n + 1, heads, d, size, generator=generator).to(DEVICE)
    state, behind = pool[:n], pool[n:].clone()

    expected, (after, *_) = exactly(bamba.mamba2_selective_state_update, state, x, step, a, b, c, skip)
    out = states.state_space_update(state, x, step, a, b, c, skip)
    assert out.dtype == dtype and torch.equal(pool[n:], behind)
    assert_close(out, expected, 2 if dtype != torch.float32 else 100)
    assert_close(state, after, 100)
