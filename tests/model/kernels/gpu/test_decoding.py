"""What attention does first in a decode step, rotation and the write to the cache, against its definition in float64;
test_training.py has the rotation of whole rows.

It rounds where a Llama layer rounds, so the bounds count roundings of the type, relative to what was rounded.
"""

import pytest
import torch
from gpu_attention import exact
from gpu_kernels import DEVICE, DTYPES, assert_within, cases, random

from hybrid_grpo.model.kernels.gpu.attention import Turn, paged_attention

EPSILON = 1e-6
WORST = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Bounds of the error, relative to the largest value, of roundings of queries, weights and results."""


def rms_norm(x, weight):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()


@pytest.mark.parametrize("case", cases())
def test_rotation_and_cache_write(case, seeded):
    rng, generator = seeded(case)
    dtype, n, d = rng.choice(DTYPES), rng.randint(1, 3), rng.choice([2, 16, 24, 64, 80, 96, 128])
    kv = rng.choice([1, 2])
    heads, page, width = kv * rng.choice([1, 3, 20]), rng.choice([4, 256]), rng.randint(1, 3)
    q, k, v = (random(generator, dtype, n, count * d) for count in (heads, kv, kv))
    norms = (random(generator, dtype, d), random(generator, dtype, d)) if rng.random() < 0.5 else None
    position = torch.tensor([rng.randrange(width * page) for _ in range(n)], device=DEVICE)
    # Wider than used, as a slice of all slots' tables is; page 0 is never written.
    wide = (1 + torch.randperm(n * width, generator=generator)).int().view(n, width)
    table = torch.cat([wide, torch.zeros_like(wide)], 1).to(DEVICE)[:, :width]
    angle = torch.arange(width * page)[:, None] * (10_000.0 ** -(torch.arange(d // 2) * 2 / d))
    rope = torch.cat([angle.cos(), angle.cos(), angle.sin(), angle.sin()], 1).to(DEVICE, dtype)
    keys, values = (random(generator, dtype, n * width + 1, page, kv, d) for _ in range(2))
    before, qkv = (keys.clone(), values.clone()), torch.cat([q, k, v], dim=1)
    options = d**-0.5, rng.choice([0, 7]), 0.0, None
    query, turn = qkv[:, : heads * d].view(n, heads, d), Turn(qkv, rope, position, norms, EPSILON)
    splits, least = rng.choice([1, 3]), rng.choice([16, 64])
    out = paged_attention(query, keys, values, table, position, *options, {}, splits=splits, least=least, turn=turn)

    cos, sin = rope.double()[position][:, None].split(d, dim=-1)

    def rotated(x, weight):
        x = x.view(n, -1, d).double()
        x = x if weight is None else rms_norm(x, weight)
        first, second = x.chunk(2, dim=-1)
        size = x.abs() + torch.cat([second, first], -1).abs()
        return x * cos + torch.cat([-second, first], -1) * sin, size

    at = table[torch.arange(n), position // page].long(), position % page
    expected, size = rotated(k, norms and norms[1])
    assert_within(keys[at], expected, 3 if norms is None else 6, size)
    assert torch.equal(values[at], v.view(n, kv, d))
    turned, _ = rotated(q, norms and norms[0])
    expected = exact(turned.cpu(), keys.cpu(), values.cpu(), table.cpu(), position.cpu(), None, *options)
    assert (out.double().cpu() - expected).abs().max() <= WORST[dtype] * max(1.0, float(expected.abs().max()))
    for pool, kept in zip((keys, values), before, strict=True):
        pool[at] = kept[at]
        assert torch.equal(pool, kept), "nothing else was written"
