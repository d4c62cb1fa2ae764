"""Rotary embedding on a GPU: of whole rows in training and prefill, and what attention does of it in a decode step.

Su et al., arXiv:2104.09864, in the layout and with the roundings of transformers' Llama.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

_TILE = 2048
"""Most elements of each half that a program rotates at once."""


class Turn(NamedTuple):
    """What a decode step attends with: products that are still to be normed and rotated, and to come into the cache.

    qkv: [n, (heads + 2 * kv) * d], contiguous: queries, keys and values beside each other.
    rope: cosines and sines of every position, [positions, 2 * d]; rotary: int64 [n], the positions in it.
    norms: weights [d] of the RMS norms of the heads of queries and keys, for models that have them.
    """

    qkv: Tensor
    rope: Tensor
    rotary: Tensor
    norms: tuple[Tensor, Tensor] | None = None
    epsilon: float = 0.0


@triton.jit
def loaded(pool, place, inside, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load numbers `first` to `WIDTH` of some entries, [entries, BLOCK]."""
    column = first + tl.arange(0, BLOCK)
    there = inside[:, None] & (column < WIDTH)[None, :]
    return tl.load(pool + place[:, None] + column[None, :], mask=there, other=0.0)


@triton.jit
def inverse_rms(x, place, real, epsilon, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Return what the norm of some heads multiplies them by, [heads]."""
    part = loaded(x, place, real, 0, D, D0).to(tl.float32)
    squares = tl.sum(part * part, 1)
    if D1:
        part = loaded(x, place, real, D0, D, D1).to(tl.float32)
        squares += tl.sum(part * part, 1)
    return tl.rsqrt(squares / D + epsilon)


@triton.jit
def turned(x, place, real, first, turn, norm, inverse, D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Load numbers `first` on of some heads, normed by `norm` and `inverse` and rotated by `turn`, [heads, BLOCK]."""
    column = first + tl.arange(0, BLOCK)
    other = tl.where(column < D // 2, column + D // 2, column - D // 2)
    inside = column < D
    there = real[:, None] & inside[None, :]
    a = tl.load(x + place[:, None] + column[None, :], there, 0.0)
    b = tl.load(x + place[:, None] + other[None, :], there, 0.0)
    kind = a.dtype
    if NORM:
        a = (a.to(tl.float32) * inverse[:, None]).to(kind).to(tl.float32) * tl.load(norm + column, inside, 0.0)[None, :]
        b = (b.to(tl.float32) * inverse[:, None]).to(kind).to(tl.float32) * tl.load(norm + other, inside, 0.0)[None, :]
    cos, sin = tl.load(turn + column, inside, 0.0), tl.load(turn + D + column, inside, 0.0)
    straight = (a.to(kind).to(tl.float32) * cos.to(tl.float32)[None, :]).to(kind).to(tl.float32)
    crossed = (b.to(kind).to(tl.float32) * sin.to(tl.float32)[None, :]).to(kind).to(tl.float32)
    return (straight + tl.where(column < D // 2, -crossed, crossed)).to(kind)


@triton.jit
def store_new(
    qkv, place, behind, to_key, to_value, one, first, turn, norm, inverse, D: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Store numbers `first` on of a new key, which is at `place`, and of its value, `behind` it."""
    column = first + tl.arange(0, BLOCK)[None, :] + place[:, None] * 0
    there = one[:, None] & (column < D)
    tl.store(to_key + column, turned(qkv, place, one, first, turn, norm, inverse, D, BLOCK, NORM), there)
    tl.store(to_value + column, loaded(qkv, place + behind, one, first, D, BLOCK), there)


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
