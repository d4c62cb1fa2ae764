"""Attention over segments of different lengths, on a CPU: the kernels of attention.c, in float32."""

from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.model.kernels.build import run


@torch.library.custom_op("hybrid_grpo::segment_attention", mutates_args=())
def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments_S4: Tensor, longest: int, before: int, scale: float,
    window: int, softcap: float, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention of query [N, heads, d] to key and value [N, key_value_heads, d], all in bfloat16 or float32,
    [N, heads, d], and the logarithm of the sum of exponentials of each query's logits, float32 [N, heads].

    Args:
        segments_S4: int64; start and length of each segment, then of its prefix.
        longest: the most keys that a segment attends to.
        before: sum of the lengths of all prefixes.
        scale, window, softcap, sinks: see `model.ragged_attention.Options`.
    """
    q, k, v = (x.contiguous().float() for x in (query, key, value))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    sizes = len(segments_S4), longest, q.shape[1], k.shape[1], q.shape[2], window, scale, softcap
    run("segment_attention", out, lse, q, k, v, sinks, segments_S4, *sizes)
    return out.to(query.dtype), lse


@segment_attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, segments_S4, ctx.longest, ctx.before, ctx.scale, ctx.window, ctx.softcap, sinks = inputs
    ctx.save_for_backward(query, key, value, *output, segments_S4, sinks)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *halves, lse, segments_S4, sinks = ctx.saved_tensors
    query, key, value, out, wide = (x.contiguous().float() for x in (*halves, dout))
    dq, dk, dv = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    (_, heads, d), of_keys = query.shape, key.shape[1]
    sizes = len(segments_S4), ctx.longest, heads, of_keys, d, ctx.window, ctx.scale, ctx.softcap
    tensors = dq, dk, dv, key.new_zeros(2, ctx.before, of_keys, d), wide, out, lse, query, key, value
    run("segment_attention_gradient", *tensors, segments_S4, *sizes)
    return *(x.to(dout.dtype) for x in (dq, dk, dv)), *[None] * 6, sink_gradient(dout, out, lse, sinks)


segment_attention.register_autograd(_gradient, setup_context=_keep)


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of sinks [heads], given attention's output and its gradient [N, heads, d] and `lse`, the
    logarithm of the sum of exponentials of each query's logits and sink [N, heads]."""
    if sinks is None:
        return None
    # The derivative of a softmax: the sink's weight times how far its value, which is 0, is below the mean.
    mean = (dout.float() * out.float()).sum(-1)
    return -(torch.exp(sinks.float() - lse) * mean).sum(0).to(sinks.dtype)
