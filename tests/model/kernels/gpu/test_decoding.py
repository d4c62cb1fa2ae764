"""The rotation of a decode step, against its definition in float64; test_training.py has its other kernels.

It rounds where a Llama layer rounds, so the bounds count roundings of the type, relative to what was rounded.
"""

import pytest
import torch
from gpu_kernels import DEVICE, DTYPES, assert_within, cases, random

from hybrid_grpo.model.kernels.gpu.rotation import rotate_and_store

EPSILON = 1e-6


def rms_norm(x, weight):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()


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
    expected, size = rotated(q, norms and norms[0])
    assert_within(qkv[:, : heads * d].view(n, heads, d), expected, roundings, size)
    at = table[torch.arange(n), position // page].long(), position % page
    expected, size = rotated(k, norms and norms[1])
    assert_within(keys[at], expected, roundings, size)
    assert torch.equal(values[at], v.view(n, kv, d))
    for pool in (keys, values):
        pool[at] = 0
        assert not pool.any(), "nothing else was written"
