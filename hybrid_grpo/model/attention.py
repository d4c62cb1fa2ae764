"""The attention implementation that this package registers with transformers, under the name `ATTENTION`.

Each forward takes a `Batch` as its keyword argument `batch`, which decides which tokens attend to which: transformers
builds no masks for an implementation that it does not know.

`Segments` is the batch of training. Sequences stand one after the other in a single row of tokens, so that no padding
is computed. A segment is a run of tokens that attend causally to each other and to all tokens of a prefix elsewhere in
the row. So the completions of a group share one forward of their prompt, exactly: its gradient is the sum over them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface

from hybrid_grpo.model.blocks import Blocks, Spans
from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.kernels.attention import SegmentAttention, sink_gradient
from hybrid_grpo.model.kernels.build import usable
from hybrid_grpo.model.latents import caches_latents
from hybrid_grpo.model.runs import Runs
from hybrid_grpo.model.upload import Selection, upload

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:  # absent, built for another torch, or a package of this name without it, as flash-attn-4 leaves
    flash_attn_varlen_func = None

ATTENTION = "hybrid"


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


class Batch(Protocol):
    """Defines which tokens of one forward attend to which, and computes their attention."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor: ...


@runtime_checkable
class LatentBatch(Protocol):
    """A batch that attends to latents in the place of keys and values, where a layer caches those."""

    def attend_to_latents(self, query: Tensor, module: nn.Module, options: Options) -> Tensor: ...


def routed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    batch: Batch | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention; called by transformers. Returns [n, q, heads, value_dim], and None for its weights.

    Args:
        query: [n, heads, q, head_dim]; key: [n, key_value_heads, q, head_dim], of the same tokens.
        value: [n, key_value_heads, q, value_dim].
        scaling, sliding_window, softcap, s_aux: `Options`; s_aux are the sinks.
    """
    assert batch is not None, "a forward with this attention is given `batch`"
    scale, width = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    options = Options(scale, sliding_window or 0, softcap or 0.0, s_aux)
    if isinstance(batch, LatentBatch) and caches_latents(module):
        return batch.attend_to_latents(query, module, options), None
    if key.shape[-1] != width:
        # Kernels and pages have one width for keys and values. Zeros at the end change neither logits nor sums.
        widest = max(key.shape[-1], width)
        query, key, value = (F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    return batch.attend(query, key, value, options)[..., :width], None


AttentionInterface.register(ATTENTION, routed_attention)


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


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


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
        query, key, value, out, lse_HN, sinks = ctx.saved_tensors
        # No dropout, so no random state.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        gradients = varlen_backward()(
            dout.contiguous(),
            query,
            key,
            value,
            out,
            lse_HN,
            *ctx.ragged,
            ctx.window == (-1, 0),
            state,
            ctx.scale,
            list(ctx.window),
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


class Segments:
    """Which tokens of one row attend to which; see the module's docstring.

    Args:
        own: (start, length) of every segment; together they fill the row, in order.
        prefix: (start, length) of each segment's prefix; length 0 means no prefix. A prefix is another whole segment,
            or keys and values without queries; these follow the row's own keys and values, in segment order.
        blocks: tokens that also attend to later ones.
        parents: for each segment, the number of the one that it continues; -1 for none, or if that has no queries.
        paths: tokens of the row whose keys and values are repeated behind it, for prefixes of several segments.
    """

    def __init__(
        self,
        own: Spans,
        prefix: Spans,
        device: torch.device,
        blocks: Blocks | None = None,
        parents: Sequence[int] = (),
        paths: Sequence[np.ndarray] = (),
    ) -> None:
        self._blocks, self._parents = blocks, parents or [-1] * len(own)
        self._paths = Selection(np.concatenate(paths), device) if paths else None
        self._own, self._prefix, self._device = list(own), list(prefix), device
        if on_gpu(device):
            # Upload now, so that no forward begins with uploads.
            _ = self._lengths

    @classmethod
    def of_tree(
        cls, own: Spans, parents: Sequence[int], device: torch.device, blocks: Blocks | None = None
    ) -> Segments:
        """Return the segments of a tree. Each attends to the earlier one that it continues, whose number is in
        `parents` (-1: none), and to all that this one does."""
        whole = {-1: np.empty(0, np.int64)}
        """The tokens up to the end of each segment that others continue."""
        prefix, paths = {-1: (0, 0)}, list[np.ndarray]()
        end = sum(own[-1])
        for number in sorted({*parents} - {-1}):
            start, length = own[number]
            above = whole[parents[number]]
            whole[number] = np.concatenate([above, np.arange(start, start + length)])
            prefix[number] = start, length
            if len(above):
                prefix[number] = end, len(whole[number])
                paths.append(whole[number])
                end += len(whole[number])
        return cls(own, [prefix[parent] for parent in parents], device, blocks, parents, paths)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Compute `routed_attention` for n = 1, with the fastest kernel for the device and the dtypes."""
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        if self._paths is not None:
            k, v = (torch.cat([tensor, self._paths(tensor)]) for tensor in (k, v))
        if usable(q, k, v, options.sinks):
            out = SegmentAttention.apply(q, k, v, *self._table, *options)
        elif has_ragged_kernel(q, options.softcap, options.sinks is not None):
            gathered, begins, longest = self._lengths
            keys, values = (k, v) if gathered is None else (gathered(k), gathered(v))
            out = ragged_attention(q, keys, values, begins, longest, options)
        else:
            out = self._one_by_one(q, k, v, options)
        if self._blocks is not None and (options.window or not self._blocks.windows_only):
            out = self._with_blocks(out, q, k, v, options)
        return out[None]

    def _with_blocks(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Return the causal attention `out` with that of the blocks in their places."""
        assert self._blocks is not None
        places, found = [], []
        for own, seen, allowed in self._blocks.parts(self._own, self._prefix, options.window, self._device):
            keys, values = (torch.cat([x[part] for part in seen]).transpose(0, 1)[None] for x in (key, value))
            queries = query[own].transpose(0, 1)[None]
            found.append(attend(queries, keys, values, allowed, options)[0].transpose(0, 1))
            places.append(torch.arange(own.start, own.stop, device=self._device))
        return out.index_copy(0, torch.cat(places), torch.cat(found).to(out.dtype))

    @cached_property
    def runs(self) -> Runs:
        """The segments as layers with a state see them."""
        return Runs(self._own, self._parents, self._device)

    @cached_property
    def _table(self) -> tuple[Tensor, int, int]:
        """Arguments of `SegmentAttention`: the segments, the most keys of a segment, the total length of prefixes."""
        rows = [(*own, *prefix) for own, prefix in zip(self._own, self._prefix, strict=True)]
        longest = max(length + before for _, length, _, before in rows)
        before = sum(before for *_, before in rows)
        return upload(np.array(rows, dtype=np.int64), self._device), longest, before

    def _one_by_one(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        window = options.window
        # Split rather than sliced: the gradient of a slice is as large as the whole row.
        q = query.split([length for _, length in self._own])
        pieces = sorted({*self._own, *(prefix for prefix in self._prefix if prefix[1])})
        k, v = (tensor.split([length for _, length in pieces]) for tensor in (key, value))
        number_at = {start: number for number, (start, _) in enumerate(pieces)}
        rows = []
        for i, (start, before) in enumerate(self._prefix):
            seen = [number_at[start], i] if before else [i]
            keys, values = (torch.cat([pieces[number] for number in seen]) for pieces in (k, v))
            allowed = None
            if before or 0 < window < len(keys):
                allowed = torch.ones(len(q[i]), len(keys), dtype=torch.bool, device=self._device).tril(before)
                allowed = allowed.triu(before - window + 1) if window else allowed
            queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in (q[i], keys, values))
            rows.append(attend(queries, keys, values, allowed, options)[0].transpose(0, 1))
        return torch.cat(rows)

    @cached_property
    def _lengths(self) -> tuple[Selection | None, tuple[Tensor, Tensor], tuple[int, int]]:
        """For GPU kernels of variable lengths: which keys to gather (None: the row itself), the first query and the
        first key of each segment (both int32 [segments + 1]), and the most queries and keys of a segment."""
        queries = [length for _, length in self._own]
        keys = [p + length for (_, p), length in zip(self._prefix, queries, strict=True)]
        query_begins, key_begins = (
            upload(np.cumsum([0, *lengths]).astype(np.int32), self._device) for lengths in (queries, keys)
        )
        gathered = None
        if keys != queries:
            index = np.concatenate(
                [start + np.arange(n) for pair in zip(self._prefix, self._own, strict=True) for start, n in pair]
            )
            gathered = Selection(index, self._device)
        return gathered, (query_begins, key_begins), (max(queries), max(keys))
