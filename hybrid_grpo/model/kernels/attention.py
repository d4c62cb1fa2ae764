"""Attention over segments of different lengths, on a CPU in float32: the kernels of attention.c."""

from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.model.kernels.build import run


class SegmentAttention(torch.autograd.Function):
    """(query [N, heads, d], key and value [N, key_value_heads, d]) -> [N, heads, d].

    Args:
        segments_S4: int64; start and length of each segment, then of its prefix.
        longest: the most keys that a segment attends to.
        before: sum of the lengths of all prefixes.
        scale, window, softcap: see `model.attention.routed_attention`; 0 means no window and no cap.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments_S4: Tensor,
        longest: int,
        before: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2])
        ctx.sizes = (len(segments_S4), longest, query.shape[1], key.shape[1], query.shape[2], window, scale, softcap)
        ctx.before = before
        run("segment_attention", out, lse, query, key, value, segments_S4, *ctx.sizes)
        ctx.save_for_backward(query, key, value, out, lse, segments_S4)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, segments_S4 = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        before = key.new_zeros(2, ctx.before, *key.shape[1:])
        given = (dout.contiguous(), out, lse, query, key, value, segments_S4)
        run("segment_attention_gradient", dq, dk, dv, before, *given, *ctx.sizes)
        return dq, dk, dv, None, None, None, None, None, None
