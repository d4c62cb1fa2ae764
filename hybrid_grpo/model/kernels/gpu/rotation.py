"""Rotary embedding and cache write on a GPU: one program rotates, or stores, one head of one sequence's new token."""

import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch


@triton.jit
def _half(x, norm, base, half, d, epsilon, NORM: tl.constexpr, BLOCK: tl.constexpr):
    """Load both halves of a head in float32, rounded as in memory, and norm them if the model norms its heads."""
    place = tl.arange(0, BLOCK)
    inside = place < half
    a = tl.load(x + base + place, mask=inside, other=0.0)
    b = tl.load(x + base + half + place, mask=inside, other=0.0)
    first, second = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        variance = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / d
        scale = tl.rsqrt(variance + epsilon)
        first = (first * scale).to(a.dtype).to(tl.float32) * tl.load(norm + place, mask=inside, other=0.0)
        second = (second * scale).to(a.dtype).to(tl.float32) * tl.load(norm + half + place, mask=inside, other=0.0)
        first, second = first.to(a.dtype).to(tl.float32), second.to(a.dtype).to(tl.float32)
    return first, second


@triton.jit
def _rotate_and_store(
    qkv,
    q_norm,
    k_norm,
    rope,
    rotary,
    position,
    table,
    table_stride,
    keys,
    values,
    epsilon,
    heads,
    kv,
    d,
    page,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = d // 2
    place = tl.arange(0, BLOCK)
    inside = place < half
    at = tl.load(position + row)
    turn = tl.load(rotary + row)
    kind = keys.dtype.element_ty
    entry = tl.load(table + row * table_stride + at // page).to(tl.int64) * page + at % page
    source = (row * (heads + 2 * kv) + head) * d
    if head >= heads + kv:
        # A head of the values, stored as it is.
        target = (entry * kv + head - heads - kv) * d
        for begin in tl.static_range(2):
            x = tl.load(qkv + source + begin * half + place, mask=inside)
            tl.store(values + target + begin * half + place, x, mask=inside)
    else:
        cos_a = tl.load(rope + turn * 2 * d + place, mask=inside, other=0.0).to(tl.float32)
        cos_b = tl.load(rope + turn * 2 * d + half + place, mask=inside, other=0.0).to(tl.float32)
        sin_a = tl.load(rope + turn * 2 * d + d + place, mask=inside, other=0.0).to(tl.float32)
        sin_b = tl.load(rope + turn * 2 * d + d + half + place, mask=inside, other=0.0).to(tl.float32)
        if head < heads:
            target = source
            a, b = _half(qkv, q_norm, source, half, d, epsilon, NORM, BLOCK)
            out = qkv
        else:
            target = (entry * kv + head - heads) * d
            a, b = _half(qkv, k_norm, source, half, d, epsilon, NORM, BLOCK)
            out = keys
        first = (a * cos_a).to(kind).to(tl.float32) - (b * sin_a).to(kind).to(tl.float32)
        second = (b * cos_b).to(kind).to(tl.float32) + (a * sin_b).to(kind).to(tl.float32)
        tl.store(out + target + place, first.to(kind), mask=inside)
        tl.store(out + target + half + place, second.to(kind), mask=inside)


def rotate_and_store(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
    rope: Tensor,
    rotary_n: Tensor,
    position_n: Tensor,
    table_nw: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Rotate the queries in place, and write the rotated keys and the values into the cache.

    Rotary position embedding: Su et al., arXiv:2104.09864, in the layout and with the roundings of transformers' Llama.

    Args:
        qkv: [n, (heads + 2 * kv) * d], contiguous: queries, keys and values beside each other.
        norms: weights [d] of the RMS norms of the heads of queries and keys, for models that have them.
        rope: cosines and sines of every position, [positions, 2 * d].
        rotary_n: int64 [n], the positions in `rope`.
        position_n: int64 [n], those in the cache; table_nw: int32 [n, width], the pages of each sequence.
        keys, values: a layer's cache, [pages, page, kv, d].
    """
    _, page, kv, d = keys.shape
    heads = qkv.shape[1] // d - 2 * kv
    q_norm, k_norm = norms or (qkv, qkv)
    launch(
        _rotate_and_store,
        (len(qkv), heads + 2 * kv),
        *(qkv, q_norm, k_norm, rope, rotary_n, position_n, table_nw, table_nw.stride(0), keys, values),
        *(epsilon, heads, kv, d, page),
        NORM=norms is not None,
        BLOCK=triton.next_power_of_2(d // 2),
        num_warps=1,
    )
