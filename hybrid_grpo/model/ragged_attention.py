"""Softmax attention in torch, and GPU kernels for sequences of different lengths: torch's, or flash-attn's where it is
installed. Each is compared with the first before it is used."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.kernels.attention import sink_gradient
from hybrid_grpo.model.upload import on_gpu

try:
    from flash_attn_interface import flash_attn_varlen_func  # FlashAttention 3, for Hopper
except ImportError:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:  # absent, built for another torch, or without it, as flash-attn-4 leaves a package of this name
        flash_attn_varlen_func = None


class Options(NamedTuple):
    """How the products of queries and keys become weights."""

    scale: float
    window: int = 0
    """A query attends to itself and the `window - 1` positions before it; 0 means to all positions before it."""
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv:2408.00118 section 2); 0 means no cap."""
    sinks: Tensor | None = None
    """[heads], one more logit for each query of a head, whose value is zero (gpt-oss, arXiv:2508.10925 section 2.3)."""


Kernel = Callable[[tuple[Any, ...], Options], Tensor]
"""Computes `ragged_attention`, given its tensors and longest lengths."""
ROUNDING = 0.03
"""Largest accepted relative error of a bfloat16 kernel against float32; 0.004 is normal, and a wrong head gives 1."""


def attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, options: Options) -> Tensor:
    """Compute attention with grouped query heads in torch, and return the output [n, heads, q, d].

    Args:
        query: [n, heads, q, d]; key, value: [n, key_value_heads, k, d].
        allowed: bool mask that is broadcast to [n, 1, q, k]; None means causal attention with q = k.
        options: all but the window, which `allowed` knows.
    """
    scale, _, softcap, sinks = options
    if not softcap and sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=scale, enable_gqa=True
        )
    n, heads, q, _ = query.shape
    if allowed is None:
        allowed = torch.ones(q, q, dtype=torch.bool, device=query.device).tril()
    groups = heads // key.shape[1]
    # The query heads of one key-value head become further queries, so that keys are not repeated in memory.
    logits = query.reshape(n, key.shape[1], groups * q, -1) @ key.transpose(2, 3) * (scale / (softcap or 1.0))
    logits = (torch.tanh(logits) * softcap if softcap else logits).unflatten(2, (groups, q))
    logits = logits.masked_fill(~allowed.unsqueeze(-3), float("-inf")).float()
    if sinks is not None:
        sink = sinks.float().view(1, -1, groups, 1, 1).expand(n, -1, -1, q, -1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    return (weights.to(value.dtype).flatten(2, 3) @ value).reshape(n, heads, q, -1)


def varlen() -> Any:
    """Return torch's module for sequences of different lengths, which takes seconds to import."""
    from torch.nn.attention import varlen

    return varlen


def varlen_backward() -> Callable[..., Any]:
    """Return the backward pass of torch's kernel, an operator that its module registers."""
    return torch.ops.torch_attn._varlen_attn_backward


def varlen_takes(*options: str) -> bool:
    """Whether torch's kernel has these options; older versions have fewer."""
    return _parameters(varlen().varlen_attn).issuperset(options)


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def has_ragged_kernel(query: Tensor, softcap: float, has_sinks: bool) -> bool:
    """Whether there is a GPU kernel for `ragged_attention`."""
    if has_sinks:
        return not softcap and _is_right(_varlen, query, "torch's varlen_attn for attention sinks", has_sinks=True)
    return has_flash(query) or (not softcap and _is_right(_varlen, query, "torch's varlen_attn"))


def has_flash(x: Tensor) -> bool:
    """Whether flash-attn is installed and correct for tensors like `x` [..., head_dim]; if so, it is preferred."""
    return flash_attn_varlen_func is not None and _is_right(_flash, x, "flash-attn")


def _is_right(kernel: Kernel, x: Tensor, name: str, *, has_sinks: bool = False) -> bool:
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    if not is_half or not on_gpu(x.device):
        return False
    return gpu.proven("attention", _agrees, kernel, x.device, x.dtype, x.shape[-1], has_sinks, kernel=name)


def ragged_attention(
    query: Tensor, key: Tensor, value: Tensor, begins: tuple[Tensor, Tensor], longest: tuple[int, int], options: Options
) -> Tensor:
    """Compute the causal attention of concatenated sequences with a GPU kernel, and return [N, heads, d].

    The queries of a sequence are its last tokens, so a sequence may have more keys than queries.

    Args:
        query: [N, heads, d]; key, value: [K, key_value_heads, d].
        begins: the offsets of each sequence's first query and of its first key, both int32 [sequences + 1]. Two
            tensors even if they are equal: given one of them twice, torch 2.15 would take cuDNN.
        longest: the most queries and the most keys of any sequence.
    """
    kernel = _flash if options.sinks is None and has_flash(query) else _varlen
    return kernel((query.contiguous(), key.contiguous(), value.contiguous(), *begins, *longest), options)


def _flash(inputs: tuple[Any, ...], options: Options) -> Tensor:
    scale, window, softcap, sinks = options
    assert sinks is None, "flash-attn's backward is not used with sinks"
    seen = (window - 1, 0) if window else (-1, -1)
    out: Tensor = flash_attn_varlen_func(*inputs, softmax_scale=scale, causal=True, window_size=seen, softcap=softcap)
    return out


def _varlen(inputs: tuple[Any, ...], options: Options) -> Tensor:
    scale, window, softcap, sinks = options
    assert not softcap, "torch's kernel has no soft caps"
    if sinks is not None:
        out: Tensor = _VarlenWithSinks.apply(*inputs, scale, window, sinks)
        return out
    return varlen().varlen_attn(*inputs, **_varlen_options(scale, window))


def _varlen_options(scale: float, window: int) -> dict[str, Any]:
    # torch 2.11 lacks the option, but its kernel accepts fewer key heads all the same.
    grouped = {"enable_gqa": True} if varlen_takes("enable_gqa") else {}
    return {"scale": scale, "window_size": (window - 1, 0) if window else (-1, 0), **grouped}


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the attention with sinks [heads], given a kernel's output without them [..., heads, d], and the logarithm
    of the sum of exponentials of each query's logits, float32 [..., heads]; see `Options`."""
    return (out * torch.sigmoid(lse - sinks.float())[..., None]).to(out.dtype)


class _VarlenWithSinks(torch.autograd.Function):
    """torch's kernel with sinks. Its backward computes each weight from the log-sum-exp, and the derivative of the
    softmax from the output: both are exact if both include the sinks."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:
        *ragged, scale, window, sinks = args
        ctx.ragged, options = ragged, _varlen_options(scale, window)
        ctx.scale, ctx.window = scale, options["window_size"]
        aux = varlen().AuxRequest(lse=True)
        out, lse_HN = varlen().varlen_attn(query, key, value, *ragged, return_aux=aux, **options)
        out = with_sinks(out, lse_HN.T, sinks)
        lse_HN = torch.logaddexp(lse_HN, sinks.float()[:, None])
        ctx.save_for_backward(query, key, value, out, lse_HN, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse_HN, sinks = ctx.saved_tensors
        # No dropout, so no random state.
        unwindowed, state = ctx.window == (-1, 0), torch.zeros(2, dtype=torch.uint64, device=dout.device)
        gradients = varlen_backward()(
            dout.contiguous(), *tensors, out, lse_HN, *ctx.ragged, unwindowed, state, ctx.scale, list(ctx.window)
        )
        return *gradients, None, None, None, None, None, None, sink_gradient(dout, out, lse_HN.T, sinks)


def _agrees(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, has_sinks: bool) -> bool:
    """Whether a kernel and torch agree, gradients included, on two sequences with two query heads per key head."""
    generator, edges = torch.Generator().manual_seed(0), [0, 7, 24]
    # This may run inside a checkpointed forward, which must not count the tensors saved here.
    apart = saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), apart:
        drawn = [torch.randn(24, heads, head_dim, generator=generator) for heads in (4, 2, 2, 4)]
        q, k, v, weight = (tensor.to(device, dtype).requires_grad_() for tensor in drawn)
        sinks = torch.linspace(-1, 1, 4, device=device, dtype=dtype).requires_grad_() if has_sinks else None
        options = Options(head_dim**-0.5, sinks=sinks)
        begins = [torch.tensor(edges, dtype=torch.int32, device=device) for _ in range(2)]
        found = kernel((q, k, v, *begins, 17, 17), options)
        parts = zip(*(x.float().transpose(0, 1)[None].split([7, 17], 2) for x in (q, k, v)), strict=True)
        expected = torch.cat([attend(q, k, v, None, options)[0].transpose(0, 1) for q, k, v in parts])
        leaves = [x for x in (q, k, v, sinks) if x is not None]
        found_all, expected_all = (
            [out.float(), *torch.autograd.grad((out.float() * weight).sum(), leaves)] for out in (found, expected)
        )
    pairs = zip(found_all, expected_all, strict=True)
    gaps = [(a.detach().float() - b.detach().float()).norm() / b.detach().float().norm() for a, b in pairs]
    return bool(torch.stack(gaps).max() < ROUNDING)
