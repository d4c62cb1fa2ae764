"""Decoding one token of each sequence on a CPU: the kernels of decoding.c.

torch's own kernels are made for larger matrices.
"""

from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid_grpo.model.kernels.build import run, usable
from hybrid_grpo.model.kernels.states import gated_norm

FEW_ROWS = 512
"""Up to this many rows the kernel is at least as fast as torch's matrix product; more do not fit in the cache."""


def install_kernels(model: Any) -> None:
    """Make a model's linear and RMS-norm modules use the kernels; its weights must not be sharded. A norm is replaced
    only if one of the two known formulas (weight, or 1 + weight) agrees with its own forward."""
    if not usable(*(p for p in model.parameters() if p.is_floating_point())):
        return
    for module in model.modules():
        kind = type(module)
        if kind is nn.Linear and usable(module.weight):
            module.forward = MethodType(_linear, module)
        elif kind.__name__.endswith("RMSNorm") and (offset := norm_offset(module)) is not None:
            module.forward = partial(_rms_norm, module, offset)
        elif kind.__name__.endswith("RMSNormGated") and _is_gated_norm(module):
            module.forward = MethodType(gated_norm, module)


def _linear(module: Any, x: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    k = x.shape[-1]
    rows = x.numel() // k
    if rows > FEW_ROWS or not (x.is_contiguous() and weight.is_contiguous()):
        return nn.functional.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    run("linear", out, x, weight, bias, rows, weight.shape[0], k)
    return out


def epsilon_of(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _rms_norm(module: Any, offset: float, x: Tensor) -> Tensor:
    x, weight = x.contiguous(), module.weight
    out = torch.empty_like(x)
    run("rms_norm", out, x, weight, offset, epsilon_of(module), x.numel() // len(weight), len(weight))
    return out


def norm_offset(module: Any) -> float | None:
    """Return what an RMS norm adds to its weight, 0 or 1; None if a module computes neither."""
    weight = getattr(module, "weight", None)
    if not isinstance(epsilon_of(module), float) or weight is None or weight.dim() != 1 or not usable(weight):
        return None
    x = torch.linspace(-2, 3, 2 * len(weight)).view(2, -1)
    found = module(x)
    fitting = (of for of in (0.0, 1.0) if torch.allclose(_rms_norm(module, of, x), found, rtol=1e-5, atol=1e-6))
    return next(fitting, None)


def _is_gated_norm(module: Any) -> bool:
    """Whether a module computes what `gated_norm` does."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(epsilon, float) or weight is None or weight.dim() != 1 or not usable(weight):
        return False
    x = torch.linspace(-2, 3, 4 * len(weight)).view(2, 2, -1)
    try:
        expected = module(*x)
    except TypeError:
        return False
    return torch.allclose(gated_norm(module, *x), expected, rtol=1e-5, atol=1e-6)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, table: Tensor, position: Tensor,
    options: Any,
) -> Tensor:  # fmt: skip
    """Store the new keys and values in the cache, and return the attention output [n, 1, heads, d]; see `DecodeStep`.

    Args:
        query: [n, heads, 1, d]; key, value: [n, kv, 1, d], of the new tokens.
        keys, values: the layer's cache, [pages, page, kv, d].
        options: `model.ragged_attention.Options`.
    """
    n, heads, _, d = query.shape
    query, key, value = query.float(), key.float(), value.float()
    out = query.new_empty(n, 1, heads, d)
    run(
        "decode_attention", out, query, query.stride(0), query.stride(1), key, key.stride(0), key.stride(1),
        value, value.stride(0), value.stride(1), keys, values, table, position,
        n, heads, key.shape[1], d, keys.shape[1], table.stride(0),
        options.window, options.scale, options.softcap, options.sinks,
        keys.dtype == torch.bfloat16,
    )  # fmt: skip
    return out.to(keys.dtype)


def can_attend(query: Tensor, keys: Tensor, sinks: Tensor | None) -> bool:
    """Whether `decode_attention` supports these shapes and types."""
    same = usable(query, keys, dtype=torch.bfloat16) or usable(query, keys)
    return same and usable(sinks) and fits(query.shape[1] // keys.shape[2], keys.shape[1], query.shape[3])


def fits(group: int, page: int, d: int) -> bool:
    """Whether one page's scores and sums, for the `group` query heads of one key head, fit on the kernel's stack."""
    return group <= 64 and group * page <= 2048 and max(group, page) * d <= 8192


class Alike(NamedTuple):
    """Which of n rows have the same text: for text u, row_n[begin_u[u] : begin_u[u + 1]]; both int64."""

    begin_u: Tensor
    row_n: Tensor

    def spread(self, x_u: Tensor) -> Tensor:
        """Give each row the entry of its text."""
        x_n = x_u.repeat_interleave(self.begin_u.diff(), dim=0)
        return torch.empty_like(x_n).index_copy_(0, self.row_n, x_n)


def sample(
    logits_uV: Tensor, key_n: Tensor, counter_n: Tensor, temperature: float, alike: Alike | None = None
) -> tuple[Tensor, Tensor]:
    """Draw tokens (int64 [n]) with log-probabilities (float32 [n]), without filters or penalties; see `Sampler`."""
    token_n, logp_n = torch.empty_like(key_n), logits_uV.new_empty(len(key_n))
    begin_u, row_n = alike or (None, None)
    run("sample", token_n, logp_n, logits_uV, key_n, counter_n, begin_u, row_n, temperature, *logits_uV.shape)
    return token_n, logp_n
