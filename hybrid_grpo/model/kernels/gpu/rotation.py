"""Rotary embedding and cache write on a GPU: one program rotates, or stores, some heads of a sequence's new token."""

import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

_HEADS = 8
"""Heads that a program rotates or stores at once."""


@triton.jit
def _normed(a, b, weight, place, inside, half, d, epsilon):
    """Norm both halves of heads, [heads, half], and round as in memory."""
    first, second = a.to(tl.float32), b.to(tl.float32)
    variance = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / d
    scale = tl.rsqrt(variance + epsilon)[:, None]
    first = (first * scale).to(a.dtype).to(tl.float32) * tl.load(weight + place, mask=inside, other=0.0)[None, :]
    second = (second * scale).to(a.dtype).to(tl.float32) * tl.load(weight + half + place, mask=inside, other=0.0)[
        None, :
    ]
    return first.to(a.dtype), second.to(a.dtype)


@triton.jit
def _rotate_and_store(
    qkv, q_norm, k_norm, rope, rotary, position, table, table_stride, keys, values, epsilon, heads, kv, d, page,
    NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, place = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    half = d // 2
    inside = place < half
    of_query, of_value = head < heads, head >= heads + kv
    of_key = (head >= heads) & (head < heads + kv)
    there = (head < heads + 2 * kv)[:, None] & inside[None, :]
    at = tl.load(position + row)
    turn = rope + tl.load(rotary + row) * 2 * d + place
    entry = tl.load(table + row * table_stride + at // page).to(tl.int64) * page + at % page
    kind = keys.dtype.element_ty
    source = qkv + ((row * (heads + 2 * kv) + head) * d)[:, None] + place[None, :]
    a, b = tl.load(source, mask=there, other=0.0), tl.load(source + half, mask=there, other=0.0)
    # Heads of the values are stored as they are.
    to_values = values + ((entry * kv + head - heads - kv) * d)[:, None] + place[None, :]
    tl.store(to_values, a, mask=there & of_value[:, None])
    tl.store(to_values + half, b, mask=there & of_value[:, None])
    if NORM:
        q_a, q_b = _normed(a, b, q_norm, place, inside, half, d, epsilon)
        k_a, k_b = _normed(a, b, k_norm, place, inside, half, d, epsilon)
        a, b = tl.where(of_query[:, None], q_a, k_a), tl.where(of_query[:, None], q_b, k_b)
    a, b = a.to(tl.float32), b.to(tl.float32)
    cos_a, cos_b = tl.load(turn, mask=inside, other=0.0), tl.load(turn + half, mask=inside, other=0.0)
    sin_a, sin_b = tl.load(turn + d, mask=inside, other=0.0), tl.load(turn + d + half, mask=inside, other=0.0)
    first = (a * cos_a.to(tl.float32)[None, :]).to(kind).to(tl.float32)
    second = (b * cos_b.to(tl.float32)[None, :]).to(kind).to(tl.float32)
    first = (first - (b * sin_a.to(tl.float32)[None, :]).to(kind).to(tl.float32)).to(kind)
    second = (second + (a * sin_b.to(tl.float32)[None, :]).to(kind).to(tl.float32)).to(kind)
    tl.store(source, first, mask=there & of_query[:, None])
    tl.store(source + half, second, mask=there & of_query[:, None])
    to_keys = keys + ((entry * kv + head - heads) * d)[:, None] + place[None, :]
    tl.store(to_keys, first, mask=there & of_key[:, None])
    tl.store(to_keys + half, second, mask=there & of_key[:, None])


def rotate_and_store(
    qkv: Tensor, norms: tuple[Tensor, Tensor] | None, epsilon: float, rope: Tensor, rotary_n: Tensor,
    position_n: Tensor, table_nw: Tensor, keys: Tensor, values: Tensor,
) -> None:  # fmt: skip
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
        _rotate_and_store, (len(qkv), triton.cdiv(heads + 2 * kv, _HEADS)),
        qkv, q_norm, k_norm, rope, rotary_n, position_n, table_nw, table_nw.stride(0), keys, values,
        epsilon, heads, kv, d, page,
        NORM=norms is not None, HEADS=_HEADS, BLOCK=triton.next_power_of_2(d // 2), num_warps=2,
    )  # fmt: skip
