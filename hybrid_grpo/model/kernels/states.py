"""One new token through layers that carry a state, on a CPU in float32: the kernels of states.c.

Each takes the arguments of the function of transformers with its name, writes the state in place, and returns None
where the kernel does not support the shapes or types.
"""

from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.model.kernels.build import run, usable

WIDEST = 512
"""Numbers in the widest head of `delta_step`."""
_ACTIVATIONS = {None: False, "silu": True, "swish": True}


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | None:
    """Return the causal convolution of one new token of each sequence, [n, C, 1].

    Args:
        hidden_states: [n, C, 1]; conv_state: [n, C, K], the tokens before; weight: [C, K]; bias: [C].
    """
    n, channels, count = hidden_states.shape
    given = hidden_states[:, :, 0], conv_state, weight, bias
    fits = count == 1 and activation in _ACTIVATIONS and conv_state.shape == (n, *weight.shape)
    if not fits or not _dense(*given):
        return None
    out = hidden_states.new_empty(n, 1, channels)
    run("conv_step", out, *given, _ACTIVATIONS[activation], n, channels, weight.shape[1])
    return out.transpose(1, 2)


def recurrent_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *, unit: bool
) -> Tensor | None:
    """Return the outputs [n, 1, heads, dv] of one new token of each sequence.

    Args:
        query, key: [n, 1, key heads, dk]; with `unit`, each head is brought to length 1.
        value: [n, 1, heads, dv]; beta: [n, 1, heads].
        log_decay: [n, 1, heads] or, for each channel of a key, [n, 1, heads, dk].
        state: [n, heads, dk, dv].
    """
    n, count, key_heads, dk = key.shape
    heads, dv = value.shape[2:]
    log_decay, beta = log_decay.contiguous(), beta.contiguous()
    heads_dense = all(_of_heads(t) for t in (query, key, value))
    fits = count == 1 and max(dk, dv) <= WIDEST and state.shape == (n, heads, dk, dv)
    if not fits or not heads_dense or not _dense(log_decay, beta, state) or not usable(query, key, value):
        return None
    out = value.new_empty(n, 1, heads, dv)
    strided = (part for tensor in (query, key, value) for part in (tensor, tensor.stride(0)))
    channels = dk if log_decay.dim() == 4 else 1
    run("delta_step", out, state, *strided, log_decay, beta, unit, n, heads, key_heads, dk, dv, channels)
    return out


def mamba2_update(
    state: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None
) -> Tensor | None:
    """Return the outputs [n, heads, d] of one new token of each sequence.

    Args:
        state: [n, heads, d, size]; x, step: [n, heads, d]; a: [heads, d, size], equal within a head; b, c:
            [n, groups, size]; skip: [heads, d], equal within a head.
    """
    n, heads, d, size = state.shape
    equal = a.stride()[1:] == (0, 0) and (skip is None or skip.stride(1) == 0)
    step = step.contiguous()
    if not equal or not _dense(state, step) or not all(map(_of_heads, (x[:, None], b[:, None], c[:, None]))):
        return None
    a_H, skip_H = a[:, 0, 0].contiguous(), None if skip is None else skip[:, 0].contiguous()
    if not usable(x, b, c, a_H, skip_H):
        return None
    out = x.new_empty(n, heads, d)
    given = x, x.stride(0), step, a_H, b, b.stride(0), c, c.stride(0), skip_H
    run("mamba_step", out, state, *given, n, heads, d, size, b.shape[1])
    return out


def gated_norm(module: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Return rms_norm(x) * weight * silu(gate); all [..., d]."""
    x, gate = x.contiguous(), gate.contiguous()
    out = torch.empty_like(x)
    weight = module.weight
    run("gated_norm", out, x, gate, weight, module.variance_epsilon, x.numel() // len(weight), len(weight))
    return out


def _dense(*tensors: Tensor | None) -> bool:
    """Whether the kernels can be called on tensors whose memory has no gaps."""
    return usable(*tensors) and all(t is None or t.is_contiguous() for t in tensors)


def _of_heads(x: Tensor) -> bool:
    """Whether the heads of each row of x, [n, 1, heads, d], follow each other in memory."""
    return x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3])
