"""Rotary embedding on a GPU: in a decode step with the write to the cache, and of whole rows in training and prefill.

Su et al., arXiv:2104.09864, in the layout and with the roundings of transformers' Llama.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

_HEADS = 8
"""Heads that a program of a decode step rotates or stores at once."""
_TILE = 2048
"""Most elements of each half that a program of whole rows rotates at once."""


@triton.jit
def _normed(a, b, weight, place, inside, half, d, epsilon):
    """Norm both halves of heads, [heads, half], and round as in memory."""
    first, second = a.to(tl.float32), b.to(tl.float32)
    variance = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / d
    scale = tl.rsqrt(variance + epsilon)[:, None]
    first = (first * scale).to(a.dtype).to(tl.float32) * tl.load(weight + place, mask=inside, other=0.0)[None, :]
    second = (second * scale).to(a.dtype).to(tl.float32)
    second *= tl.load(weight + half + place, mask=inside, other=0.0)[None, :]
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


@triton.jit
def _heads(out, x, stride, heads, half, d, cos_a, cos_b, sin_a, sin_b, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate a token's heads, whose first two halves cos and sin belong to; columns after those are copied."""
    kind: tl.constexpr = out.dtype.element_ty
    place = tl.arange(0, BLOCK)[None, :]
    for begin in range(0, heads, HEADS):
        head = begin + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (place < half)
        source, target = x + head * stride, out + head * d
        a = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + half + place, mask=inside, other=0.0).to(tl.float32)
        first = (a * cos_a).to(kind).to(tl.float32) - (b * sin_a).to(kind).to(tl.float32)
        second = (b * cos_b).to(kind).to(tl.float32) + (a * sin_b).to(kind).to(tl.float32)
        tl.store(target + place, first.to(kind), mask=inside)
        tl.store(target + half + place, second.to(kind), mask=inside)
        for column in range(2 * half, d, BLOCK):
            rest = column + place
            copied = (head < heads) & (rest < d)
            tl.store(target + rest, tl.load(source + rest, mask=copied), mask=copied)


@triton.jit
def _rotate(
    q_out, k_out, q, k, cos, sin, q_row, q_token, q_head, k_row, k_token, k_head, cos_row, cos_token, length, heads,
    kv, half, d,
    BACK: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    # Division of 64 bits is a call.
    token, row, at = number.to(tl.int64), (number // length).to(tl.int64), (number % length).to(tl.int64)
    place = tl.arange(0, BLOCK)[None, :]
    inside = place < half
    angle = row * cos_row + at * cos_token + place
    cos_a = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + angle + half, mask=inside, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + angle + half, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        # The transposed rotation.
        sin_a, sin_b = -sin_b, -sin_a
    q_at, k_at = row * q_row + at * q_token, row * k_row + at * k_token
    _heads(q_out + token * heads * d, q + q_at, q_head, heads, half, d, cos_a, cos_b, sin_a, sin_b, HEADS, BLOCK)
    _heads(k_out + token * kv * d, k + k_at, k_head, kv, half, d, cos_a, cos_b, sin_a, sin_b, KV, BLOCK)


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    rows, heads, length, d = q.shape
    kv, half = k.shape[1], cos.shape[-1] // 2
    # Laid out as attention kernels read them, and as the projections' outputs are.
    q_out, k_out = (x.new_empty(rows, length, x.shape[1], d) for x in (q, k))
    strides = [x.stride(i) for x in (q, k) for i in (0, 2, 1)]
    block = triton.next_power_of_2(half)
    q_heads, k_heads = (min(triton.next_power_of_2(count), max(1, _TILE // block)) for count in (heads, kv))
    launch(
        _rotate, (rows * length,),
        q_out, k_out, q, k, cos, sin, *strides, cos.stride(0) if len(cos) > 1 else 0, cos.stride(1),
        length, heads, kv, half, d,
        BACK=back, HEADS=q_heads, KV=k_heads, BLOCK=block, num_warps=max(1, q_heads * block // 256),
    )  # fmt: skip
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


class Rotate(torch.autograd.Function):
    """Returns rotated queries and keys, each [rows, heads, length, d], but with the heads of a token as neighbors.

    Args: q: [rows, heads, length, d]; k: [rows, kv, length, d]; cos, sin: [rows or 1, length, r], of one layout, for
    the first r columns of a head, r even; the other columns are copied.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _rotated(q, k, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotated(dq, dk, *ctx.saved_tensors, back=True), None, None
