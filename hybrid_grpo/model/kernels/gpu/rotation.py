"""Rotary embedding on a GPU, of whole rows in training and prefill.

Su et al., arXiv:2104.09864, in the layout and with the roundings of transformers' Llama.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

_TILE = 2048
"""Most elements of each half that a program rotates at once."""


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
