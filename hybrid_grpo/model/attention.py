"""The attention implementation that this package registers with transformers, under the name `ATTENTION`.

Each forward is given a `Batch` as its keyword argument `batch`, which decides which tokens attend to which:
transformers builds no masks for an implementation that it does not know.

`Segments` is the batch of training. Sequences stand one after the other in a single row of tokens, so that no padding
is computed. A segment is a run of tokens that attend causally to each other and to all tokens of a prefix elsewhere in
the row. So the completions of a group share one forward of their prompt, exactly: in backward the prompt's gradient is
the sum over its completions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from hybrid_grpo.model.kernels.attention import SegmentAttention
from hybrid_grpo.model.kernels.build import usable

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None
try:
    from torch.nn.attention.varlen import varlen_attn

    _VARLEN = {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)
except ImportError:
    _VARLEN = False

ATTENTION = "hybrid"

_SHRINK = 0.75
"""Segments at least this fraction as long as the longest of a bucket are padded into it."""
_NOWHERE = 1 << 40
"""Position of missing prefix keys: after every query, so that no query attends to them."""


class Batch(Protocol):
    """Which tokens of one forward attend to which, and how that is computed."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
    ) -> Tensor: ...


def routed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    batch: Batch | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention, called by transformers.

    Args:
        query: [n, heads, q, head_dim].
        key, value: [n, key_value_heads, q, head_dim], of the same tokens.
        sliding_window: a query attends to itself and the `sliding_window - 1` positions before it.
        softcap: see `attend`.

    Returns:
        [n, q, heads, head_dim], and None in place of the attention weights.
    """
    assert batch is not None, "a forward with this attention is given `batch`"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return batch.attend(query, key, value, scale, sliding_window or 0, softcap or 0.0), None


AttentionInterface.register(ATTENTION, routed_attention)


def attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attention [n, heads, q, d] in torch, with grouped query heads.

    Args:
        query: [n, heads, q, d]; key, value: [n, key_value_heads, k, d].
        allowed: bool, broadcast to [n, 1, q, k]; None: causal, with q = k.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv:2408.00118 section 2); 0: none.
    """
    if not softcap:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=scale, enable_gqa=True
        )
    n, heads, q, _ = query.shape
    if allowed is None:
        allowed = torch.ones(q, q, dtype=torch.bool, device=query.device).tril()
    groups = heads // key.shape[1]
    # The query heads of one key-value head become further queries, so that keys are not repeated in memory.
    logits = query.reshape(n, key.shape[1], groups * q, -1) @ key.transpose(2, 3) * (scale / softcap)
    logits = (torch.tanh(logits) * softcap).unflatten(2, (groups, q))
    weights = logits.masked_fill(~allowed.unsqueeze(-3), float("-inf")).softmax(-1, dtype=torch.float32)
    return (weights.to(value.dtype).flatten(2, 3) @ value).reshape(n, heads, q, -1)


class _Gather(torch.autograd.Function):
    """Rows of x by index, possibly repeated. Backward sums in a fixed order, which index_add on a GPU does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, uses: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.rows, ctx.uses = len(x), uses
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dx = grad.new_zeros(ctx.rows, *grad.shape[1:])
        for row_R, output_RM in ctx.uses:
            used = grad.index_select(0, output_RM.flatten())
            dx.index_copy_(0, row_R, used.unflatten(0, output_RM.shape).sum(1) if output_RM.shape[1] > 1 else used)
        return dx, None, None


class Selection:
    """A gather of rows whose backward is deterministic.

    Args:
        index: the input row of every output row.
        real: bool, output rows that count; the others are padding and send no gradient back. Default: all.
    """

    def __init__(self, index: np.ndarray, device: torch.device, real: np.ndarray | None = None) -> None:
        outputs = np.arange(len(index)) if real is None else np.flatnonzero(real)
        order = outputs[np.argsort(index[outputs], kind="stable")]
        rows, first, counts = np.unique(index[order], return_index=True, return_counts=True)
        self._index = _tensor(index, device)
        # Input rows grouped by how often they are used, each with its output rows.
        self._uses = []
        for count in np.unique(counts):
            chosen = counts == count
            self._uses.append(
                (_tensor(rows[chosen], device), _tensor(order[first[chosen, None] + np.arange(count)], device))
            )

    def __call__(self, x: Tensor) -> Tensor:
        chosen: Tensor = _Gather.apply(x, self._index, self._uses)
        return chosen


@dataclass
class _Bucket:
    """b segments of similar length, padded to q queries and k keys each."""

    shape: tuple[int, int, int]
    query: Selection
    key: Selection
    query_position_bq: Tensor
    key_position_bk: Tensor


class Segments:
    """Which tokens of one row attend to which; see the module's docstring.

    Args:
        own: (start, length) of every segment; together they fill the row, in order.
        prefix: (start, length) of each segment's prefix; length 0: none.
    """

    def __init__(self, own: Sequence[tuple[int, int]], prefix: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._own, self._prefix, self._device = list(own), list(prefix), device
        self._allowed: dict[tuple[int, int], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
        """See `routed_attention`, with n = 1. Takes the fastest way that the device and the types allow."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if k.shape == v.shape and usable(q, k, v):
            return self._native(q, k, v, scale, window, softcap)[None]
        half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
        if half and (flash_attn_varlen_func is not None or (_VARLEN and not softcap)):
            return self._ragged(q, k, v, scale, window, softcap)[None]
        return self._bucketed(q, k, v, scale, window, softcap)[None]

    def _native(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
        out: Tensor = SegmentAttention.apply(query, key, value, *self._table, scale, window, softcap)
        return out

    @cached_property
    def _table(self) -> tuple[Tensor, int, int]:
        """What `SegmentAttention` takes: the segments, the keys of the longest, and the tokens of all prefixes."""
        rows = [(*own, *prefix) for own, prefix in zip(self._own, self._prefix, strict=True)]
        longest = max(length + before for _, length, _, before in rows)
        before = sum(before for *_, before in rows)
        return _tensor(np.array(rows, dtype=np.int64), self._device), longest, before

    def _bucketed(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
        buckets, restore = self._buckets
        parts = []
        for number, bucket in enumerate(buckets):
            b, q, k = bucket.shape
            out = attend(
                bucket.query(query).view(b, q, *query.shape[1:]).transpose(1, 2),
                bucket.key(key).view(b, k, *key.shape[1:]).transpose(1, 2),
                bucket.key(value).view(b, k, *value.shape[1:]).transpose(1, 2),
                self._mask(number, bucket, window),
                scale,
                softcap,
            )
            parts.append(out.transpose(1, 2).flatten(0, 1))
        return restore(torch.cat(parts))

    def _mask(self, number: int, bucket: _Bucket, window: int) -> Tensor | None:
        """Which keys of a bucket its queries attend to, bool [b, 1, q, k]; None: plain causal attention."""
        _, q, k = bucket.shape
        # Without prefixes there are as many keys as queries.
        if q == k and (not window or q <= window):
            return None
        if (number, window) not in self._allowed:
            query, key = bucket.query_position_bq[:, :, None], bucket.key_position_bk[:, None]
            allowed = key <= query
            if window:
                allowed &= key > query - window
            self._allowed[number, window] = allowed[:, None]
        return self._allowed[number, window]

    @cached_property
    def _buckets(self) -> tuple[list[_Bucket], Selection]:
        """The buckets, longest segments first, and the gather that puts their outputs back into the row's order."""
        parts: list[list[int]] = []
        for i in sorted(range(len(self._own)), key=lambda i: (self._prefix[i][1] > 0, -self._own[i][1])):
            first = parts[-1][0] if parts else i
            new = not parts or (self._prefix[i][1] > 0) != (self._prefix[first][1] > 0)
            if new or self._own[i][1] < _SHRINK * self._own[first][1]:
                parts.append([])
            parts[-1].append(i)
        buckets = []
        output_N = np.zeros(sum(length for _, length in self._own), dtype=np.int64)
        offset = 0
        for part in parts:
            starts, lengths = np.array([self._own[i] for i in part]).T
            prefix_starts, prefix_lengths = np.array([self._prefix[i] for i in part]).T
            b, q, p = len(part), int(lengths.max()), int(prefix_lengths.max())
            own_bq = starts[:, None] + np.arange(q)
            real_bq = np.arange(q) < lengths[:, None]
            before_bp = prefix_starts[:, None] + np.arange(p)
            real_bk = np.concatenate([np.arange(p) < prefix_lengths[:, None], real_bq], axis=1)
            index_bk = np.where(real_bk, np.concatenate([before_bp, own_bq], axis=1), 0)
            position_bq = prefix_lengths[:, None] + np.arange(q)
            # Right padding has positions after every real query, so only padding attends to it, and never to nothing:
            # an empty softmax row would be NaN.
            before_bp = np.where(real_bk[:, :p], np.arange(p), _NOWHERE)
            output_N[own_bq[real_bq]] = offset + np.flatnonzero(real_bq)
            offset += b * q
            buckets.append(
                _Bucket(
                    (b, q, p + q),
                    Selection(np.where(real_bq, own_bq, 0).ravel(), self._device, real_bq.ravel()),
                    Selection(index_bk.ravel(), self._device, real_bk.ravel()),
                    _tensor(position_bq, self._device),
                    _tensor(np.concatenate([before_bp, position_bq], axis=1), self._device),
                )
            )
        return buckets, Selection(output_N, self._device)

    @cached_property
    def _lengths(self) -> tuple[Selection | None, tuple[Tensor, Tensor], tuple[int, int]]:
        """For variable-length GPU kernels: the keys to gather (None: the row itself), the first query and the first
        key of each segment (both int32 [segments + 1]), and the most queries and keys of a segment."""
        queries = [length for _, length in self._own]
        keys = [p + length for (_, p), length in zip(self._prefix, queries, strict=True)]
        query_begins, key_begins = (
            _tensor(np.cumsum([0, *lengths]).astype(np.int32), self._device) for lengths in (queries, keys)
        )
        gathered = None
        if keys != queries:
            index = np.concatenate(
                [start + np.arange(n) for pair in zip(self._prefix, self._own, strict=True) for start, n in pair]
            )
            gathered = Selection(index, self._device)
        return gathered, (query_begins, key_begins), (max(queries), max(keys))

    def _ragged(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
        gathered, begins, longest = self._lengths
        if gathered is not None:
            key, value = gathered(key), gathered(value)
        given = (query.contiguous(), key.contiguous(), value.contiguous(), *begins, *longest)
        out: Tensor
        if flash_attn_varlen_func is not None:
            seen = (window - 1, 0) if window else (-1, -1)
            out = flash_attn_varlen_func(*given, softmax_scale=scale, causal=True, window_size=seen, softcap=softcap)
        else:
            seen = (window - 1, 0) if window else (-1, 0)
            out = varlen_attn(*given, scale=scale, window_size=seen, enable_gqa=True)  # type: ignore[assignment]
        return out


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
