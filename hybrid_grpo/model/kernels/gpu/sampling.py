"""Drawing tokens on a GPU, where a program reads a block of a row. generation/categorical.py defines what it computes.

Filters are searched for in whole rows. Then a kernel sums the weights of each block, and another draws, from these sums
and from the one block that has the token. Sums of integers do not depend on who adds up what.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

_BLOCK = 4096
"""Not measured yet: on an H200 one program took 67 us for a row of 151,936, which 38 share now."""
_SEARCH_BLOCK = 1024
"""Smaller, because a search holds sixteen sums for each column of a block."""


@triton.jit
def _row(logits, start, vocabulary, BLOCK: tl.constexpr):
    """Load a block of a row in float32, with a mask of the columns that exist. Minus zero becomes zero, its equal."""
    column = start + tl.arange(0, BLOCK)
    inside = column < vocabulary
    x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(x == 0, 0.0, x), inside


@triton.jit
def _weight(x, inside, peak, inverse_temperature):
    """Return probabilities as integers; the unit is 2^-40 times the probability of the most probable token."""
    w = tl.exp((x - peak) * inverse_temperature) * 1099511627776.0
    return tl.where(inside & (w == w), w, 0.0).to(tl.int64)


@triton.jit
def _key(x, BITS: tl.constexpr):
    """Map x to integers from 0 to 2^BITS - 1 that have the same order; 16 bits are enough for bfloat16."""
    bits = x.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) + 2147483648) >> (32 - BITS)


@triton.jit
def _portion(total, of_2_23):
    """total * of_2_23 / 2^23, rounded down."""
    return (total >> 23) * of_2_23 + (((total & 0x7FFFFF) * of_2_23) >> 23)


@triton.jit
def _draw(key, counter):
    """Return the upper 23 bits of the SplitMix64 draw with this number; see `generation.categorical.draw`."""
    x = key + (counter + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x >> 41) & 0x7FFFFF


@triton.jit
def _lowest_kept(
    logits, vocabulary, peak, inverse_temperature, least, limit,
    WEIGHTED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the smallest key above which the tokens' weights (or their count) add up to less than `limit`.

    This searches instead of sorting: each pass over the row finds four bits. Keys below `least` do not count.
    """
    digit = tl.arange(0, 16)
    lowest, above = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for level in range(BITS // 4):
        shift = BITS - 4 - 4 * level
        sums = tl.zeros([16, BLOCK], tl.int64)
        for start in range(0, vocabulary, BLOCK):
            x, inside = _row(logits, start, vocabulary, BLOCK)
            key = _key(x, BITS)
            if WEIGHTED:
                amount = _weight(x, inside, peak, inverse_temperature)
            else:
                amount = inside.to(tl.int64)
            counted = (key >= least) & (key >= lowest)
            place = tl.where(counted, (key - lowest) >> shift, -1).to(tl.int32)
            sums += tl.where(place[None, :] == digit[:, None], amount[None, :], 0)
        amounts = tl.sum(sums, axis=1)
        higher = above + tl.sum(amounts, axis=0) - tl.cumsum(amounts, axis=0)
        chosen = tl.sum((higher >= limit).to(tl.int32), axis=0)
        above = tl.sum(tl.where(digit == chosen, higher, 0), axis=0)
        lowest += chosen.to(tl.int64) << shift
    return lowest


@triton.jit
def _search(
    peaks, lowest_key, logits, stride, vocabulary, inverse_temperature, top_k, top_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, SEARCH_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    peak, lowest = tl.load(peaks + row).to(tl.float32), tl.zeros([], tl.int64)
    if TOP_K:
        lowest = _lowest_kept(logits, vocabulary, peak, inverse_temperature, lowest, top_k, False, BITS, SEARCH_BLOCK)
    if TOP_P:
        before = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocabulary, BLOCK):
            x, inside = _row(logits, start, vocabulary, BLOCK)
            before += _weight(x, inside & (_key(x, BITS) >= lowest), peak, inverse_temperature)
        limit = _portion(tl.sum(before, axis=0), top_p)
        lowest = tl.maximum(
            lowest, _lowest_kept(logits, vocabulary, peak, inverse_temperature, lowest, limit, True, BITS, SEARCH_BLOCK)
        )
    tl.store(lowest_key + row, lowest)


@triton.jit
def _sum_weights(
    sums, kept_sums, least, peaks, lowest_key, logits, stride, vocabulary, inverse_temperature, least_weight,
    SEARCHED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, inside = _row(logits + row * stride, block * BLOCK, vocabulary, BLOCK)
    weight = _weight(x, inside, tl.load(peaks + row).to(tl.float32), inverse_temperature)
    lowest = tl.load(lowest_key + row) if SEARCHED else 0
    kept = tl.where((_key(x, BITS) >= lowest) & (weight >= least_weight), weight, 0)
    at = row * tl.num_programs(1) + block
    tl.store(sums + at, tl.sum(weight, axis=0))
    tl.store(kept_sums + at, tl.sum(kept, axis=0))
    tl.store(least + at, tl.min(tl.where(kept > 0, x, float("inf")), axis=0))


@triton.jit
def _sample(
    token, logp, kept_logp, lowest_logit, sums, kept_sums, least, peaks, lowest_key, logits, stride, vocabulary,
    inverse_temperature, least_weight, keys, counters,
    GREEDY: tl.constexpr, SEARCHED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, number, blocks = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS), tl.cdiv(vocabulary, BLOCK)
    at, real, peak = row * blocks + number, number < blocks, tl.load(peaks + row).to(tl.float32)
    total, kept_sum = tl.sum(tl.load(sums + at, real, 0), axis=0), tl.load(kept_sums + at, real, 0)
    kept_total, target = tl.sum(kept_sum, axis=0), tl.zeros([], tl.int64)
    if not GREEDY:
        target = _portion(kept_total, _draw(tl.load(keys + row), tl.load(counters + row)))
    # The block in which the running sum passes the draw has the token.
    block = tl.sum((tl.cumsum(kept_sum, axis=0) <= target).to(tl.int32), axis=0)
    before = tl.sum(tl.where(number < block, kept_sum, 0), axis=0)
    logits += row * stride
    x, inside = _row(logits, block * BLOCK, vocabulary, BLOCK)
    weight = _weight(x, inside, peak, inverse_temperature)
    lowest = tl.load(lowest_key + row) if SEARCHED else 0
    kept = tl.where((_key(x, BITS) >= lowest) & (weight >= least_weight), weight, 0)
    within = tl.sum((before + tl.cumsum(kept, axis=0) <= target).to(tl.int32), axis=0)
    chosen = tl.where(kept_total > 0, block * BLOCK + within, 0)
    tl.store(token + row, chosen.to(tl.int64))
    gap = (tl.load(logits + chosen).to(tl.float32) - peak) * inverse_temperature
    tl.store(logp + row, gap - tl.log(total.to(tl.float32) * 9.094947017729282e-13))
    tl.store(kept_logp + row, gap - tl.log(kept_total.to(tl.float32) * 9.094947017729282e-13))
    # Nothing is equal to or above NaN.
    least_kept = tl.min(tl.load(least + at, real, float("inf")), axis=0)
    tl.store(lowest_logit + row, tl.where(kept_total > 0, least_kept, float("nan")))


def sample(
    logits_nV: Tensor, key_n: Tensor, counter_n: Tensor, inverse_temperature: float, top_k: int, top_p: int,
    least_weight: int, greedy: bool, names_kept: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Draw tokens as `generation.categorical.sample` does; the last six arguments are the fields of its `Filters`."""
    (n, vocabulary), blocks = logits_nV.shape, triton.cdiv(logits_nV.shape[1], _BLOCK)
    # Each has memory of its own, whose address is a multiple of 16: for others the kernels would be compiled again.
    token_n, lowest_key_n, sum_nB, kept_sum_nB = (key_n.new_empty(n, *size) for size in ((), (), (blocks,), (blocks,)))
    logp_n, kept_logp_n, lowest_n = (torch.empty(n, dtype=torch.float32, device=logits_nV.device) for _ in range(3))
    least_nB, row = logp_n.new_empty(n, blocks), (logits_nV, logits_nV.stride(0), vocabulary, inverse_temperature)
    shape = {"BITS": 16 if logits_nV.dtype == torch.bfloat16 else 32, "BLOCK": _BLOCK, "num_warps": 8}
    found, top = (logits_nV.amax(-1), lowest_key_n), {"TOP_K": 0 < top_k < vocabulary, "TOP_P": top_p < 1 << 23}
    if any(top.values()):
        launch(_search, (n,), *found, *row, top_k, top_p, SEARCH_BLOCK=_SEARCH_BLOCK, **top, **shape)
    sums, shape["SEARCHED"] = (sum_nB, kept_sum_nB, least_nB), any(top.values())
    launch(_sum_weights, (n, blocks), *sums, *found, *row, least_weight, **shape)
    launch(
        _sample, (n,),
        token_n, logp_n, kept_logp_n, lowest_n, *sums, *found, *row, least_weight, key_n, counter_n,
        GREEDY=greedy, BLOCKS=triton.next_power_of_2(blocks), **shape,
    )  # fmt: skip
    # Filters keep every token that is at least as probable as another that they keep.
    return token_n, logp_n, kept_logp_n, logits_nV >= lowest_n[:, None] if names_kept else None
