"""Attention over pages by the kernel, against its definition in float64."""

import itertools
from types import SimpleNamespace

import gpu_attention
import pytest
import torch
from gpu_kernels import DEVICE, DTYPES, cases

from hybrid_grpo.model.kernels.gpu import attention, tilings
from hybrid_grpo.model.kernels.gpu.attention import paged_attention

WORST = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Bounds of the error, relative to the largest value: two roundings to the type, of weights and of results."""
# (head_dim, value_dim): a power of two, two of them, more than that, latents.
WIDTHS = [(8, 8), (16, 16), (24, 24), (64, 64), (80, 80), (96, 96), (128, 128), (128, 128), (192, 128), (24, 64)]
LATENTS = [(24, 16), (80, 64), (576, 512)]


def exact(query, keys, values, table, position, begins, *options):
    """The double of the kernel, in float64; it wants at least one entry."""
    out = []
    for row in range(len(table)):
        a, b = (row, row + 1) if begins is None else begins[row : row + 2].tolist()
        if position[row] < 0:
            out.append(torch.zeros(b - a, query.shape[1], values.shape[-1], dtype=torch.float64))
            continue
        one = torch.tensor([0, b - a], dtype=torch.int32)
        given = query[a:b].double(), keys.double(), values.double(), table[row : row + 1], position[row : row + 1]
        out.append(gpu_attention.paged_attention(*given, *options, {}, one, b - a))
    return torch.cat(out)


@pytest.mark.parametrize("case", cases(12))
def test_attention_over_pages(case, seeded):
    """Heads of a group together, sequences split over programs or not, some with several new tokens, some empty."""
    rng, generator = seeded(case)
    dtype, n, page = rng.choice(DTYPES), rng.randint(1, 4), rng.choice([1, 16, 32, 64, 256])
    kv, group, shares = rng.choice([1, 2]), rng.choice([1, 2, 3, 6, 7, 20]), rng.random() < 0.15
    d, v = rng.choice(LATENTS if shares else WIDTHS)
    longest = 5000 if case % 40 == 39 else rng.choice([1, 5, 60, 300, 700])
    counts = [rng.choice([1, 1, 2, 5, 17]) for _ in range(n)] if rng.random() < 0.4 else [1] * n
    position = torch.tensor([rng.randrange(-1 if count == 1 else 0, longest) for count in counts])
    entries = int((position + torch.tensor(counts)).max())
    width = max(1, -(-entries // page))
    draw = [(n * width + 1, page, kv, d), (n * width + 1, page, kv, v), (sum(counts), kv * group, d + 8)]
    keys, values, query = (torch.randn(shape, generator=generator).to(dtype) for shape in draw)
    values = keys[..., :v] if shares else values
    query = query[..., :d]  # as a slice of all products of a layer
    table = (1 + torch.randperm(n * width, generator=generator)).int().view(n, width)
    begins = torch.tensor([0, *counts]).cumsum(0).int() if max(counts) > 1 else None
    sinks = torch.randn(kv * group, generator=generator) if rng.random() < 0.3 else None
    options = d**-0.5, rng.choice([0, 0, 1, 7, 100]), rng.choice([0, 0, 3.0, 30.0]), sinks
    # What is not an entry of a sequence is not read.
    unused = torch.ones(len(keys), page, dtype=torch.bool)
    for row in range(n):
        place = torch.arange(int(position[row]) + counts[row])
        unused[table[row, place // page].long(), place % page] = False
    keys[unused] = values[unused] = torch.nan
    expected = exact(query, keys, values, table, position, begins, *options)

    def on_device(*tensors):
        return [None if x is None else x.to(DEVICE) for x in tensors]

    pools = on_device(keys, values)
    if shares:
        pools[1] = pools[0][..., :v]
    query, table, position, begins, sinks = on_device(query, table, position, begins, sinks)
    scratch = {}
    for budget in (1, rng.choice([2, 3, 5, 13])):
        given = query, *pools, table, position, *options[:3], sinks, scratch, begins, max(counts)
        for least in (1, 2):  # the second time over the counters that the first one leaves
            out = paged_attention(*given, budget=budget, least=least).double().cpu()
            gap = (out - expected).abs().max()
            assert gap <= WORST[dtype] * max(1.0, float(expected.abs().max())), (budget, float(gap))


def test_all_programs_have_about_the_same_to_do():
    """Few sequences are shared, and one that is longer than the others; parts fit into the memory for them. Also on
    A100, 4090, L40S and B200, whose numbers follow from those of their multiprocessors."""
    cards = ((108, 164), (128, 100), (142, 100), (148, 228))
    named = [SimpleNamespace(multi_processor_count=n, shared_memory_per_multiprocessor=kib << 10) for n, kib in cards]
    modelled = [tilings.modelled(card) for card in named]
    assert [tiling.few for tiling in modelled] == [108, 128, 142, 296]
    lengths = [9000], [0, 700, 30_000], [500] * 63 + [32_768], [40 * row + 1 for row in range(200)]
    cases = itertools.product((*modelled, tilings.Tiling()), lengths, ((1, 0), (8, 0), (8, 1024), (1000, 0)))
    for tiling, ends, (heads, window) in cases:
        n, (budget, least) = len(ends), attention._shares(len(ends), heads, tiling)
        position = torch.tensor(ends, device=DEVICE) - 1
        row_of, plan = attention._scheduled(position, None, window, budget, least)
        units = [-(-end // 64) - max(end - window, 0) // 64 * (window > 0) for end in ends]
        first, share, part = plan.view(3, n).tolist()
        used = [max(1, -(-unit // each)) for unit, each in zip(units, share, strict=True)]
        programs, shared = (
            [row for row in range(n) for _ in range(used[row])],
            [row for row in range(n) if used[row] > 1],
        )
        assert row_of.tolist() == programs + [n] * (n + budget - len(programs))
        assert first == [sum(used[:row]) for row in range(n)]
        assert [part[row] for row in shared] == [sum(used[r] for r in shared if r < row) for row in shared]
        assert sum(used[row] for row in shared) <= 2 * budget and (not shared or 2 * budget * heads <= attention._UNITS)
        most = max(least, -(-sum(units) // budget))
        assert all(each <= max(most, -(-unit // 64)) for each, unit in zip(share, units, strict=True))
