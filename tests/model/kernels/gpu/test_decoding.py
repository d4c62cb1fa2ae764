"""What attention does first in a decode step, rotation and the write to the cache, against its double in float64;
test_training.py has the rotation of whole rows."""

import gpu_attention
import pytest
import torch
from gpu_kernels import DEVICE, DTYPES, cases, random

from hybrid_grpo.model.kernels.gpu.attention import Turn, paged_attention

WORST = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 6e-2}
"""Bounds of the error, relative to the largest value, of up to six roundings; the interpreter cuts off."""


@pytest.mark.parametrize("case", cases())
def test_rotation_and_cache_write(case, seeded):
    rng, generator = seeded(case)
    dtype, n, d = rng.choice(DTYPES), rng.randint(1, 3), rng.choice([2, 16, 24, 64, 80, 96, 128])
    kv, page, width = rng.choice([1, 2]), rng.choice([4, 256]), rng.randint(1, 3)
    heads = kv * rng.choice([1, 3, 20])
    qkv = random(generator, dtype, n, (heads + 2 * kv) * d)
    norms = (random(generator, dtype, d), random(generator, dtype, d)) if rng.random() < 0.5 else None
    position = torch.tensor([rng.randrange(width * page) for _ in range(n)], device=DEVICE)
    # Wider than used, as a slice of all slots' tables is.
    wide = (1 + torch.randperm(n * width, generator=generator)).int().view(n, width)
    table = torch.cat([wide, torch.zeros_like(wide)], 1).to(DEVICE)[:, :width]
    angle = torch.arange(width * page)[:, None] * (10_000.0 ** -(torch.arange(d // 2) * 2 / d))
    rope = torch.cat([angle.cos(), angle.cos(), angle.sin(), angle.sin()], 1).to(DEVICE, dtype)
    pools = [random(generator, dtype, n * width + 1, page, kv, d) for _ in range(2)]
    before, options = [pool.clone() for pool in pools], (d**-0.5, rng.choice([0, 7]), 0.0, None)

    def attend(function, qkv, rope, norms, pools, **how):
        turn = Turn(qkv, rope, position, norms, 0.1)
        return function(qkv.view(n, -1, d)[:, :heads], *pools, table, position, *options, {}, turn=turn, **how)

    exact = [pool.double() for pool in pools]
    in_full = qkv.double(), rope.double(), norms and [norm.double() for norm in norms]
    expected = attend(gpu_attention.paged_attention, *in_full, exact)
    out = attend(paged_attention, qkv, rope, norms, pools, budget=rng.choice([1, 7]), least=1)
    for ours, right in zip((out, *pools), (expected, *exact), strict=True):
        assert (ours.double() - right).abs().max() <= WORST[dtype] * max(1.0, float(right.abs().max()))
    at = table[torch.arange(n), position // page].long(), position % page
    assert torch.equal(pools[1][at], qkv.view(n, -1, d)[:, heads + kv :])
    for pool, kept in zip(pools, before, strict=True):
        pool[at] = kept[at]
        assert torch.equal(pool, kept), "nothing else was written"
