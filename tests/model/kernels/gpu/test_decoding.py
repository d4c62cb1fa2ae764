"""The kernels between the matrix products of a decode step, against their definitions in float64.

They round where a Llama layer rounds, so the bounds count roundings of the type, relative to what was rounded.
"""

import pytest
import torch
from gpu_kernels import DEVICE, DTYPES, cases, rounding

from hybrid_grpo.model.kernels.gpu.gate import silu_times
from hybrid_grpo.model.kernels.gpu.norm import add_norm
from hybrid_grpo.model.kernels.gpu.rotation import rotate_and_store

EPSILON = 1e-6


def assert_within(out, expected, roundings, size=None):
    """`size`: what was rounded on the way, where it can be larger than the result."""
    kind = torch.finfo(out.dtype)
    # Below the smallest normal number a type has equal steps.
    steps = kind.smallest_normal * kind.eps
    bound = roundings * (rounding(out.dtype) * (expected.abs() if size is None else size) + steps)
    gap = (out.double() - expected).abs()
    assert ((gap <= bound) | (out.isnan() & expected.isnan())).all(), float((gap / bound).max())


def random(generator, dtype, *shape, scale=1.0):
    return (scale * torch.randn(*shape, generator=generator)).to(DEVICE, dtype)


def rms_norm(x, weight):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()


@pytest.mark.parametrize("case", cases())
def test_residual_and_norm(case, seeded):
    rng, generator = seeded(case)
    dtype, n, size = rng.choice(DTYPES), rng.randint(1, 3), rng.choice([1, 7, 64, 100, 896, 1024, 1536])
    x, residual = (random(generator, dtype, n, size, scale=rng.choice([1e-3, 1, 30])) for _ in range(2))
    weight = random(generator, dtype, size)
    if case % 20 == 0:
        x[0] = 0.0
    if case % 20 == 1:
        x[0, -1] = float("nan")
    residual = residual if rng.random() < 0.8 else None
    exact = x.double() if residual is None else x.double() + residual.double()
    to = x, torch.empty_like(x), x.new_empty(n, dtype=torch.float32)
    total, out = add_norm(x, residual, weight, EPSILON, to if case % 2 else None)
    assert_within(total, exact, 1)
    # The norm is that of the rounded sum, which the model keeps.
    assert_within(out, rms_norm(total, weight), 3 if dtype != torch.float32 else 12)


@pytest.mark.parametrize("case", cases())
def test_gate_times_up(case, seeded):
    rng, generator = seeded(case)
    dtype, n, size = rng.choice(DTYPES), rng.randint(1, 4), rng.choice([1, 3, 255, 1024, 1025])
    gate_up = torch.cat([random(generator, dtype, n, size, scale=rng.choice([0.1, 1, 20])) for _ in range(2)], dim=1)
    gate, up = gate_up.split(size, dim=1)
    if case % 10 == 0:
        gate[0, 0] = rng.choice([float("nan"), 0.0, 80.0, -80.0, -1e4])
    g, rounded_argument = gate.double(), dtype == torch.float32
    expected = g * torch.sigmoid(g) * up.double()
    # A silu too small to be a normal number is rounded to a step, and multiplied.
    tiny = torch.finfo(dtype).smallest_normal * up.double().abs()
    out = gate.new_empty(n, size)
    silu_times(gate, up, out)
    # A GPU's exponential is off by a rounding of its argument.
    assert_within(out, expected, 6, expected.abs() * (1 + g.abs() * rounded_argument) + tiny)


@pytest.mark.parametrize("case", cases())
def test_rotation_and_cache_write(case, seeded):
    rng, generator = seeded(case)
    dtype, n, d = rng.choice(DTYPES), rng.randint(1, 3), rng.choice([2, 16, 64, 80, 128])
    kv = rng.choice([1, 2])
    heads, page, width = kv * rng.choice([1, 3]), rng.choice([4, 256]), rng.randint(1, 3)
    q, k, v = (random(generator, dtype, n, count * d) for count in (heads, kv, kv))
    norms = (random(generator, dtype, d), random(generator, dtype, d)) if rng.random() < 0.5 else None
    position = torch.tensor([rng.randrange(width * page) for _ in range(n)], device=DEVICE)
    # Wider than used, as a slice of all slots' tables is; page 0 is never written.
    wide = (1 + torch.randperm(n * width, generator=generator)).int().view(n, width)
    table = torch.cat([wide, torch.zeros_like(wide)], 1).to(DEVICE)[:, :width]
    angle = torch.arange(width * page)[:, None] * (10_000.0 ** -(torch.arange(d // 2) * 2 / d))
    rope = torch.cat([angle.cos(), angle.cos(), angle.sin(), angle.sin()], 1).to(DEVICE, dtype)
    keys, values = (torch.zeros(n * width + 1, page, kv, d, dtype=dtype, device=DEVICE) for _ in range(2))
    qkv = torch.cat([q, k, v], dim=1)
    rotate_and_store(qkv, norms, EPSILON, rope, position, position, table, keys, values)

    cos, sin = rope.double()[position][:, None].split(d, dim=-1)

    def rotated(x, weight):
        x = x.view(n, -1, d).double()
        x = x if weight is None else rms_norm(x, weight)
        first, second = x.chunk(2, dim=-1)
        size = x.abs() + torch.cat([second, first], -1).abs()
        return x * cos + torch.cat([-second, first], -1) * sin, size

    roundings = 3 if norms is None else 6
    roundings = roundings if dtype != torch.float32 else 4 * roundings
    expected, size = rotated(q, norms and norms[0])
    assert_within(qkv[:, : heads * d].view(n, heads, d), expected, roundings, size)
    at = table[torch.arange(n), position // page].long(), position % page
    expected, size = rotated(k, norms and norms[1])
    assert_within(keys[at], expected, roundings, size)
    assert torch.equal(values[at], v.view(n, kv, d))
    for pool in (keys, values):
        pool[at] = 0
        assert not pool.any(), "nothing else was written"
