"""Attention as this package routes it: a forward brings along who attends to whom, and what it attends with.

Registered with transformers under the name `ATTENTION`. A forward gets a `Batch` as its keyword argument `batch`, and
position ids; since transformers builds no masks for a name it does not know, who sees whom is decided by the batch.

`Segments` is that of training: sequences one after the other in a single row of tokens, so that no padding is
computed. A segment is some consecutive tokens that attend to themselves, causally, and to all of a prefix that may
stand elsewhere in the row: so the completions of a group share the forward of their prompt, exactly (in backward the
prompt gets the sum of what each of them asks of it).
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
"""A bucket takes segments down to this share of its longest."""
_NOWHERE = 1 << 40


class Batch(Protocol):
    """What one forward attends with."""

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
    """Causal attention of tokens over their own sequences.

    Args:
        query: [n, heads, q, head_dim].
        key, value: [n, key_value_heads, q, head_dim], of the same tokens.
        sliding_window: a query sees itself and the `sliding_window - 1` positions before it.
        softcap: see `attend`.
        batch: where these tokens stand, and the keys and values that are not among them.

    Returns:
        [n, q, heads, head_dim], and None for the weights.
    """
    assert batch is not None, "a forward with this attention passes batch"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return batch.attend(query, key, value, scale, sliding_window or 0, softcap or 0.0), None


AttentionInterface.register(ATTENTION, routed_attention)


def attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attention, with fewer heads of keys than of queries where there are.

    Args:
        query: [n, heads, q, d]; key, value: [n, key_value_heads, k, d].
        allowed: bool, broadcast to [n, 1, q, k]; None is causal, with q = k.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv:2408.00118 section 2); 0 for none.

    Returns:
        [n, heads, q, d].
    """
    if not softcap:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=scale, enable_gqa=True
        )
    n, heads, q, _ = query.shape
    if allowed is None:
        allowed = torch.ones(q, q, dtype=torch.bool, device=query.device).tril()
    groups = heads // key.shape[1]
    # The heads of one key become more queries of it: nothing is repeated in memory.
    logits = query.reshape(n, key.shape[1], groups * q, -1) @ key.transpose(2, 3) * (scale / softcap)
    logits = (torch.tanh(logits) * softcap).unflatten(2, (groups, q))
    weights = logits.masked_fill(~allowed.unsqueeze(-3), float("-inf")).softmax(-1, dtype=torch.float32)
    return (weights.to(value.dtype).flatten(2, 3) @ value).reshape(n, heads, q, -1)


class _Gather(torch.autograd.Function):
    """Rows of x by index, some of them several times; backward sums in a fixed order, unlike index_add on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, uses: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.rows, ctx.uses = len(x), uses
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dx = grad.new_zeros(ctx.rows, *grad.shape[1:])
        for row_R, place_RM in ctx.uses:
            used = grad.index_select(0, place_RM.flatten())
            dx.index_copy_(0, row_R, used.unflatten(0, place_RM.shape).sum(1) if place_RM.shape[1] > 1 else used)
        return dx, None, None


class Selection:
    """Which rows to gather, and for backward where each of them went.

    Args:
        index: row of every place.
        real: places that count; the others only fill up, and get no gradient.
    """

    def __init__(self, index: np.ndarray, device: torch.device, real: np.ndarray | None = None) -> None:
        places = np.arange(len(index)) if real is None else np.flatnonzero(real)
        order = places[np.argsort(index[places], kind="stable")]
        rows, first, counts = np.unique(index[order], return_index=True, return_counts=True)
        self._index = _tensor(index, device)
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
    """Segments of like length, padded to the longest: b of them, q queries and k keys each."""

    shape: tuple[int, int, int]
    query: Selection
    key: Selection
    query_position_bq: Tensor
    key_position_bk: Tensor
    """Beyond every query where a prefix has no key."""
    causal: bool
    """No segment has a prefix: who comes first is all there is to know."""


class Segments:
    """Who attends to whom in one row of tokens.

    Args:
        own: (start, length) of every segment, in the order of the row, which they fill.
        prefix: (start, length) of what each attends to before itself; length 0 for none.
        device: of the tokens.
    """

    def __init__(self, own: Sequence[tuple[int, int]], prefix: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._own, self._prefix, self._device = list(own), list(prefix), device
        self._allowed: dict[tuple[int, int], Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
        """See `routed_attention`; n is 1."""
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
        """Who may be seen in a bucket, bool [b, 1, q, k]; None where causality says it all."""
        _, q, _ = bucket.shape
        if bucket.causal and (not window or q <= window):
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
        """Buckets, longest segments first, and where each token of the row stands in their outputs."""
        parts: list[list[int]] = []
        for i in sorted(range(len(self._own)), key=lambda i: (self._prefix[i][1] > 0, -self._own[i][1])):
            first = parts[-1][0] if parts else i
            new = not parts or (self._prefix[i][1] > 0) != (self._prefix[first][1] > 0)
            if new or self._own[i][1] < _SHRINK * self._own[first][1]:
                parts.append([])
            parts[-1].append(i)
        buckets = []
        place_N = np.zeros(sum(length for _, length in self._own), dtype=np.int64)
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
            # What fills up to the right is seen by its like alone, which must see something.
            before_bp = np.where(real_bk[:, :p], np.arange(p), _NOWHERE)
            place_N[own_bq[real_bq]] = offset + np.flatnonzero(real_bq)
            offset += b * q
            buckets.append(
                _Bucket(
                    (b, q, p + q),
                    Selection(np.where(real_bq, own_bq, 0).ravel(), self._device, real_bq.ravel()),
                    Selection(index_bk.ravel(), self._device, real_bk.ravel()),
                    _tensor(position_bq, self._device),
                    _tensor(np.concatenate([before_bp, position_bq], axis=1), self._device),
                    p == 0,
                )
            )
        return buckets, Selection(place_N, self._device)

    @cached_property
    def _lengths(self) -> tuple[Selection | None, tuple[Tensor, Tensor], tuple[int, int]]:
        """For kernels that take lengths: the keys to gather (None: the row as it is), where the queries and the keys
        of each segment begin (int32 [segments + 1]), and the longest of both."""
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
