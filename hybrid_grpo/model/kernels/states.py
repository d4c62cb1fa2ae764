"""One new token through layers that carry a state: the kernels of states.c on a CPU in float32, and of gpu/states.py.

Each takes the arguments of the function of transformers with its name, writes the state in place, and returns None
where the kernel does not support the shapes or types, or differs from torch on the GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.kernels.build import run, usable

WIDEST = 512
"""Numbers in the widest head of `delta_step`."""
_ACTIVATIONS = {None: False, "silu": True, "swish": True}


def causal_conv1d_update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor | None:
    """Return the causal convolution of one new token of each sequence, [n, C, 1].

    Args:
        hidden_states: [n, C, 1]; conv_state: [n, C, K], the tokens before; weight: [C, K]; bias: [C].
    """
    n, channels, count = hidden_states.shape
    if count != 1 or activation not in _ACTIVATIONS or conv_state.shape != (n, *weight.shape):
        return None
    x, silu = hidden_states[:, :, 0], _ACTIVATIONS[activation]
    if weight.is_contiguous() and _on_gpu(_convolution_agrees, conv_state, x, weight, bias):
        return gpu.states.causal_convolution(x, conv_state, weight, bias, silu=silu)[:, :, None]
    if not usable(x) or not _dense(conv_state, weight, bias):
        return None
    out = hidden_states.new_empty(n, 1, channels)
    run("conv_step", out, x, x.stride(0), conv_state, weight, bias, silu, n, channels, weight.shape[1])
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
    if not fits or not heads_dense:
        return None
    if _on_gpu(_delta_rule_agrees, state, query, key, value, log_decay, beta):
        return gpu.states.delta_rule(
            query[:, 0], key[:, 0], value[:, 0], log_decay[:, 0], beta[:, 0], state, unit=unit
        )[:, None]
    if not _dense(log_decay, beta, state) or not usable(query, key, value):
        return None
    out = value.new_empty(n, 1, heads, dv)
    strided = (part for tensor in (query, key, value) for part in (tensor, tensor.stride(0)))
    channels = dk if log_decay.dim() == 4 else 1
    run("delta_step", out, state, *strided, log_decay, beta, unit, n, heads, key_heads, dk, dv, channels)
    return out


def state_space_update(
    state: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None
) -> Tensor | None:
    """Return the outputs [n, heads, d] of one new token of each sequence, of Mamba 2 or, with one head, of Mamba 1.

    Args:
        state: [n, heads, d, size]; x, step: [n, heads, d]; b, c: [n, groups, size].
        a: [heads, d, size], and skip, [heads, d]; it takes less time if both are expanded from a number for each head.
    """
    n, heads, d, size = state.shape
    by_channel = a.stride()[1:] != (0, 0) or (skip is not None and skip.stride(1) != 0)
    step = step.contiguous()
    if not all(map(_of_heads, (x[:, None], b[:, None], c[:, None]))):
        return None
    a = a.contiguous() if by_channel else a[:, 0, 0].contiguous()
    skip = None if skip is None else skip.contiguous() if by_channel else skip[:, 0].contiguous()
    if _on_gpu(_update_agrees, state, x, step, a, b, c, skip):
        return gpu.states.selective_update(state, x, step, a, b, c, skip)
    if not _dense(state, step, a, skip) or not usable(x, b, c):
        return None
    out = x.new_empty(n, heads, d)
    run("mamba_step", out, state, x, x.stride(0), step, a, b, b.stride(0), c, c.stride(0), skip, by_channel,
        n, heads, d, size, b.shape[1])  # fmt: skip
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


def _on_gpu(check: Callable[..., bool], state: Tensor, x: Tensor, *others: Tensor | None) -> bool:
    """Whether a Triton kernel computes the step. `check` compares it with torch, once for each type of x."""
    if not state.is_contiguous() or not gpu.usable(state, x, *(t for t in others if t is not None)):
        return False
    return gpu.proven("decoding", check, state.device, x.dtype)


def _convolution_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    x, state, weight, bias = (_random(device, dtype, *shape) for shape in ((3, 40), (3, 40, 4), (40, 4), (40,)))
    window = torch.cat([state[..., 1:], x[..., None]], -1)
    expected = F.silu((window.double() * weight).sum(-1) + bias)
    out = gpu.states.causal_convolution(x, state, weight, bias, silu=True)
    return torch.equal(state, window) and _close(out, expected)


def _delta_rule_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    query, key = _random(device, dtype, 2, 3, 2, 24)
    value, state = _random(device, dtype, 3, 4, 40), _random(device, torch.float32, 3, 4, 24, 40)
    beta = _random(device, dtype, 3, 4).sigmoid()
    for log_decay in (-_random(device, torch.float32, 3, 4).abs(), -_random(device, torch.float32, 3, 4, 24).abs()):
        q, k = (F.normalize(x.double(), dim=-1).repeat_interleave(2, 1) for x in (query, key))
        after = state.double() * log_decay.double().exp().view(3, 4, -1, 1)
        change = (value - torch.einsum("nhk,nhkv->nhv", k, after)) * beta[..., None]
        after = after + k[..., None] * change[:, :, None]
        expected = torch.einsum("nhk,nhkv->nhv", q * 24**-0.5, after)
        out = gpu.states.delta_rule(query, key, value, log_decay, beta, state, unit=True)
        if not _close(out, expected) or not _close(state, after):
            return False
    return True


def _update_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    state, x = _random(device, torch.float32, 3, 4, 16, 24), _random(device, dtype, 3, 4, 16)
    step, (b, c) = _random(device, dtype, 4, 3, 4, 16)[0].abs(), _random(device, dtype, 2, 3, 2, 24)
    into, from_ = (t.double().repeat_interleave(2, 1)[:, :, None] for t in (b, c))
    rates, skips = -_random(device, torch.float32, 4, 16, 24).abs(), _random(device, torch.float32, 4, 16)
    for a, skip in ((rates, skips), (rates[:, 0, 0].contiguous(), skips[:, 0].contiguous())):
        decay = (step.double()[..., None] * a.view(4, *a.shape[1:] or (1, 1))).exp()
        after = state * decay + (step.double() * x)[..., None] * into
        expected = (after * from_).sum(-1) + x * skip.view(4, -1)
        found = gpu.states.selective_update(state, x, step, a, b, c, skip)
        if not _close(found, expected) or not _close(state, after):
            return False
    return True


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return numbers.to(device, dtype)


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether rounding to the type explains the difference."""
    return bool((found - expected).norm() <= 2 * torch.finfo(found.dtype).eps * expected.norm() + 1e-6)


def _of_heads(x: Tensor) -> bool:
    """Whether the heads of each row of x, [n, 1, heads, d], follow each other in memory."""
    return x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3])
