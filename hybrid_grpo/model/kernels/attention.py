"""Attention over segments of different lengths, on a CPU: the kernels of attention.c, in float32."""

from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.model.kernels.build import run


class SegmentAttention(torch.autograd.Function):
    """(query [N, heads, d], key and value [N, key_value_heads, d]) -> [N, heads, d], all in bfloat16 or float32.

    Args:
        segments_S4: int64; start and length of each segment, then of its prefix.
        longest: the most keys that a segment attends to.
        before: sum of the lengths of all prefixes.
        scale, window, softcap, sinks: see `model.ragged_attention.Options`.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, segments_S4, longest, ctx.before, scale, window, softcap, sinks = args
        query, key, value = (x.contiguous().float() for x in tensors)
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2])
        ctx.sizes = (len(segments_S4), longest, query.shape[1], key.shape[1], query.shape[2], window, scale, softcap)
        run("segment_attention", out, lse, query, key, value, sinks, segments_S4, *ctx.sizes)
        out = out.to(tensors[0].dtype)
        ctx.save_for_backward(*tensors, out, lse, segments_S4, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *halves, lse, segments_S4, sinks = ctx.saved_tensors
        query, key, value, out, wide = (x.contiguous().float() for x in (*halves, dout))
        dq, dk, dv = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        tensors = dq, dk, dv, key.new_zeros(2, ctx.before, *key.shape[1:]), wide, out, lse, query, key, value
        run("segment_attention_gradient", *tensors, segments_S4, *ctx.sizes)
        return *(x.to(dout.dtype) for x in (dq, dk, dv)), *[None] * 6, sink_gradient(dout, out, lse, sinks)


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of sinks [heads], given attention's output and its gradient [N, heads, d] and `lse`, the
    logarithm of the sum of exponentials of each query's logits and sink [N, heads]."""
    if sinks is None:
        return None
    # The derivative of a softmax: the sink's weight times how far its value, which is 0, is below the mean.
    mean = (dout.float() * out.float()).sum(-1)
    return -(torch.exp(sinks.float() - lse) * mean).sum(0).to(sinks.dtype)
