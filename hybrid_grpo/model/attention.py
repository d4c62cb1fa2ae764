"""The attention implementation that this package registers with transformers, under the name `ATTENTION`.

Each forward takes a `Batch` as its keyword argument `batch`, which decides which tokens attend to which: transformers
builds no masks for an implementation that it does not know.

`Segments` is the batch of training. Sequences stand one after the other in a single row of tokens, so that no padding
is computed. A segment is a run of tokens that attend causally to each other and to all tokens of a prefix elsewhere in
the row. So the completions of a group share one forward of their prompt, exactly: its gradient is the sum over them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from hybrid_grpo.model.kernels.attention import segment_attention
from hybrid_grpo.model.kernels.build import usable
from hybrid_grpo.model.ragged_attention import Options, attend, has_ragged_kernel, ragged_attention
from hybrid_grpo.model.runs import Runs
from hybrid_grpo.model.upload import Selection, on_gpu, upload

ATTENTION = "hybrid"
Spans = Sequence[tuple[int, int]]
"""(start, length) of each."""


@dataclass(frozen=True)
class Blocks:
    """Runs of a row's tokens that attend to each other in both directions, within a window too (Gemma 3,
    arXiv:2503.19786, section 2)."""

    runs: Spans
    """None crosses the end of a segment."""
    windows_only: bool
    """Whether they do so only in layers with a sliding window."""

    def parts(
        self, own: Spans, prefix: Spans, window: int, device: torch.device
    ) -> Iterator[tuple[slice, tuple[slice, slice], Tensor]]:
        """Yield for each block its tokens, the tokens whose keys it attends to, in two parts, and which of these each
        of its own may attend to, bool [block, keys]. For `own` and `prefix` see `Segments`; 0 means no `window`."""
        starts = [start for start, _ in own]
        for start, length in self.runs:
            number = bisect_right(starts, start) - 1
            begin, (before, count) = own[number][0], prefix[number]
            seen = slice(before, before + count), slice(begin, start + length)
            key = torch.arange(count + start + length - begin, device=device)
            query = torch.arange(count + start - begin, len(key), device=device)
            yield slice(start, start + length), seen, key > query[:, None] - (window or len(key))


class Batch(Protocol):
    """Defines which tokens of one forward attend to which, and computes their attention."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor: ...


@runtime_checkable
class LatentBatch(Protocol):
    """A batch that attends to latents in the place of keys and values, where a layer caches those."""

    def attend_to_latents(self, query: Tensor, module: nn.Module, options: Options) -> Tensor: ...


def caches_latents(module: nn.Module) -> bool:
    """Whether a layer expands keys and values from latents by one product (DeepSeek-V2, arXiv:2405.04434)."""
    product = getattr(module, "kv_b_proj", None)
    return hasattr(module, "expand_kv") and type(product) is nn.Linear and product.bias is None


def absorbed(query: Tensor, latents: Tensor, module: Any, attend: Callable[..., Tensor]) -> Tensor:
    """Compute attention over latents, which all heads share, in place of the keys and values that they would be
    expanded to: the product that expands keys is applied to the query, the one of values to the result.

    Args:
        query: [n, heads, q, nope + rope]; latents: [n, 1, k, rank + rope].
        attend: computes attention [n, q, heads, rank] of a query [n, heads, q, rank + rope], keys and values.

    Returns [n, q, heads, value_dim].
    """
    nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
    weight_HDR = module.kv_b_proj.weight.view(query.shape[1], -1, rank)
    of_keys_HDR, of_values_HDR = weight_HDR[:, :nope], weight_HDR[:, nope:]
    rotated = query[..., nope:]
    query = torch.cat([query[..., :nope] @ of_keys_HDR, rotated], dim=-1)
    out = attend(query, latents, latents[..., :rank])
    return torch.einsum("nqhr,hdr->nqhd", out, of_values_HDR)


def routed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, batch: Batch | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
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
        self, own: Spans, prefix: Spans, device: torch.device, blocks: Blocks | None = None,
        parents: Sequence[int] = (), paths: Sequence[np.ndarray] = (),
    ) -> None:  # fmt: skip
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
        whole = {-1: np.empty(0, np.int64)}  # by segment, its tokens and all that it continues
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
        if usable(options.sinks) and (usable(q, k, v) or usable(q, k, v, dtype=torch.bfloat16)):
            out, _ = segment_attention(q, k, v, *self._table, *options)
        elif has_ragged_kernel(q, options.softcap, options.sinks is not None):
            gathered, begins, longest = self._lengths
            keys, values = (k, v) if gathered is None else (gathered(k), gathered(v))
            out = ragged_attention(q, keys, values, begins, longest, options)
        elif on_gpu(self._device):
            buckets, in_order = self._buckets
            out = in_order(torch.cat([bucket.attend(q, k, v, options) for bucket in buckets]))
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
        """Arguments of `segment_attention`: the segments, the most keys of a segment, the total length of prefixes."""
        rows = [(*own, *prefix) for own, prefix in zip(self._own, self._prefix, strict=True)]
        longest = max(length + before for _, length, _, before in rows)
        before = sum(before for *_, before in rows)
        return upload(np.array(rows, dtype=np.int64), self._device), longest, before

    @cached_property
    def _buckets(self) -> tuple[list[_Bucket], Selection]:
        """The segments by the powers of two of their numbers of queries and keys, and what puts their tokens in order.
        So padding at most doubles either number, and a GPU has few calls."""
        alike: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for own, prefix in zip(self._own, self._prefix, strict=True):
            size = own[1].bit_length(), (own[1] + prefix[1]).bit_length()
            alike.setdefault(size, []).append((*own, *prefix))
        buckets = [_Bucket(rows, self._device) for rows in alike.values()]
        tokens = np.concatenate([bucket.tokens for bucket in buckets])
        return buckets, Selection(np.argsort(tokens), self._device)

    def _one_by_one(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        # Split rather than sliced: the gradient of a slice is as large as the whole row.
        q = query.split([length for _, length in self._own])
        pieces = sorted({*self._own, *(prefix for prefix in self._prefix if prefix[1])})
        k, v = (tensor.split([length for _, length in pieces]) for tensor in (key, value))
        number_at = {start: number for number, (start, _) in enumerate(pieces)}
        rows = []
        for i, (start, before) in enumerate(self._prefix):
            seen = [number_at[start], i] if before else [i]
            keys, values = (torch.cat([pieces[number] for number in seen]) for pieces in (k, v))
            allowed, count = None, len(keys)
            if before or 0 < options.window < count:
                allowed = _seen(torch.arange(before, count, device=self._device), count, options.window)
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


class _Bucket:
    """Segments that attend in one call of torch, padded to the longest of them.

    `segments` are starts and lengths of their own tokens and of their prefixes; `tokens` are all their own tokens.
    """

    def __init__(self, segments: Sequence[tuple[int, ...]], device: torch.device) -> None:
        start, length, first, before = np.array(segments).T[..., None]
        # Padding repeats the last query and the last key: no query is without keys, and none sees the padding.
        query_SQ = np.minimum(np.arange(length.max()), length - 1)
        key_SK = np.minimum(np.arange((before + length).max()), before + length - 1)
        index_SK = np.where(key_SK < before, first + key_SK, start + key_SK - before)
        real_SQ = np.arange(length.max()) < length
        self.tokens = (start + query_SQ)[real_SQ]
        self._segments, self._keys = len(segments), key_SK.shape[1]
        self._query, self._key = (Selection(index.ravel(), device) for index in (start + query_SQ, index_SK))
        self._real, self._position_SQ = Selection(np.flatnonzero(real_SQ), device), upload(before + query_SQ, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Return the attention [N, heads, d] of `tokens`, given the queries, keys and values of the whole row."""
        taken = self._query(query), self._key(key), self._key(value)
        q, k, v = (x.unflatten(0, (self._segments, -1)).transpose(1, 2) for x in taken)
        allowed = _seen(self._position_SQ, self._keys, options.window)[:, None]
        return self._real(attend(q, k, v, allowed, options).transpose(1, 2).flatten(0, 1))


def _seen(position: Tensor, keys: int, window: int) -> Tensor:
    """Return which of the first `keys` keys the queries at some positions see; bool, [*position.shape, keys]."""
    place = torch.arange(keys, device=position.device)
    seen = place <= position[..., None]
    return seen & (place > position[..., None] - window) if window else seen
