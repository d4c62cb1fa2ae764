"""Attention over the paged cache: `Prefill` for the tokens of prompts, `DecodeStep` for one token of every sequence.

Each is both the `Batch` that `routed_attention` uses and the cache that the forward sees. A layer passes what it would
cache to `update`, which returns it as it is. Pages hold the keys and values that `attend` receives: they may be made
from what is cached, or belong to an earlier layer. Where a layer caches latents, pages hold those.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_grpo.generation.cache import ForwardCache, Geometry, PagedCache, Rows, cached_forward
from hybrid_grpo.model.attention import Blocks, Segments, absorbed
from hybrid_grpo.model.kernels import decoding, gpu
from hybrid_grpo.model.ragged_attention import ROUNDING, Options, attend, has_ragged_kernel, ragged_attention
from hybrid_grpo.model.routing import Recorder, joined
from hybrid_grpo.model.runs import Runs
from hybrid_grpo.model.upload import on_gpu, upload

PAGE = 32
"""Entries of a cache page."""
_FEW_TOKENS = 256
"""Up to this many new tokens of a sequence, the kernel that reads pages is taken to be faster than copying the keys of
all tokens for one that is made for many. Not measured."""


class _AllStored(Exception):
    """Ends a forward after the last layer has stored its keys and values."""


class Prefill(ForwardCache):
    """A prefill without padding: one row has the new tokens of several sequences, after those in the cache.

    Args:
        pages: the pages of each sequence, enough for all its tokens up to the end of this forward.
        starts: the number of entries that each sequence already has in the cache; 0 for a prompt.
        lengths: the number of new tokens of each sequence, at least one.
        states: the row of each sequence's states in the cache. Default: the model has none.
        recorded: for each sequence, what the cache recorded for its new tokens, if they were read before.
        blocks: new tokens that attend to each other in both directions.
    """

    def __init__(
        self, cache: PagedCache, pages: list[list[int]], starts: list[int], lengths: list[int],
        states: Sequence[int] = (), recorded: Sequence[np.ndarray | None] = (), blocks: Blocks | None = None,
    ) -> None:  # fmt: skip
        device = cache.device
        self._rows = upload(list(states), device) if cache.states else None
        self._cache, self._layers = cache, iter(cache.geometry.layers)
        self._last = -1
        """The layer whose keys and values end the forward."""
        self._starts, self._lengths = starts, lengths
        ends = [start + n for start, n in zip(starts, lengths, strict=True)]
        self._page_N, self._offset_N = self._places(pages, starts, ends)
        known = joined(list(zip(recorded, lengths, strict=True))) if recorded else None
        self.routes = cache.recorder(self._page_N, self._offset_N, known)
        position_N = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        self.position_1N = upload(position_N[None], device)
        begins = list(accumulate(lengths, initial=0))
        self._ragged = any(starts) and on_gpu(device) and blocks is None
        if self._ragged:
            self._page_K, self._offset_K = self._places(pages, [0] * len(ends), ends)
            self._ends, self._longest = ends, (max(lengths), max(ends))
            begins_2S = np.array([begins, [*accumulate(ends, initial=0)]], dtype=np.int32)
            query_begins, key_begins = upload(begins_2S, device)
            self._begins = query_begins, key_begins
            width = max(map(len, pages))
            table = np.array([[*own, *[0] * (width - len(own))] for own in pages], dtype=np.int32)
            self._table, self._start_S = upload(table, device), upload(starts, device)
            return
        # The keys of the new tokens are followed by those that each sequence has in the cache.
        own, places = list(zip(begins, lengths, strict=False)), accumulate(starts, initial=sum(lengths))
        self._segments = Segments(own, list(zip(places, starts, strict=False)), device, blocks=blocks)
        if any(starts):
            self._page_K, self._offset_K = self._places(pages, [0] * len(starts), starts)

    def _places(self, pages: list[list[int]], starts: list[int], ends: list[int]) -> tuple[Tensor, Tensor]:
        """Return the pages and offsets of the entries from `starts` to `ends`, sequence after sequence."""
        page, places = self._cache.page, []
        for own, start, end in zip(pages, starts, ends, strict=True):
            entries = np.arange(start, end)
            places.append([np.array(own, dtype=np.int64)[entries // page], entries % page])
        page_N, offset_N = upload(np.concatenate(places, axis=1), self._cache.device)
        return page_N, offset_N

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the new keys and values; `attend` will store them. Latents are stored now; return all those that the
        queries may attend to, which the layer will expand."""
        if not self._cache.geometry.latents:
            return key, value
        latents = torch.cat([key, value], dim=-1)
        latents = self._stored(latents, latents[..., :0])[0]
        return latents[..., : key.shape[3]], latents[..., key.shape[3] :]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        if not self._cache.geometry.latents:
            if self._ragged and self._longest[0] <= _FEW_TOKENS:
                group = query.shape[1] // key.shape[1]
                if has_kernel(*self._cache.place, key, value, group, options):
                    return self._over_pages(query, key, value, options)
            key, value = self._stored(key, value)
        if not self._ragged:
            return self._segments.attend(query, key, value, options)
        if has_ragged_kernel(query, options.softcap, options.sinks is not None):
            q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
            return ragged_attention(q, k, v, self._begins, self._longest, options)[None]
        queries, positions = query.split(self._lengths, 2), self.position_1N.split(self._lengths, 1)
        parts = zip(queries, key.split(self._ends, 2), value.split(self._ends, 2), positions, strict=True)
        return torch.cat([masked_attention(q, k, v, position, options) for q, k, v, position in parts], dim=1)

    def _over_pages(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Compute `attend` where sequences have few new tokens, by the kernel that reads pages."""
        keys, values = self._store(key, value)
        query, begins, longest = query[0].transpose(0, 1), self._begins[0], self._longest[0]
        return gpu.attention.paged_attention(
            query, keys, values, self._table, self._start_S, *options, self._cache.scratch, begins, longest
        )[None]

    def _store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return its cache."""
        keys, values = self._cache.layer(layer := next(self._layers))
        keys[self._page_N, self._offset_N] = key[0].transpose(0, 1)
        values[self._page_N, self._offset_N] = value[0].transpose(0, 1)
        if layer == self._last:
            raise _AllStored
        return keys, values

    def read(self, forward: Any, ids: Tensor, positions: Tensor) -> None:
        """Store what the layers of a model cache of the new tokens; for the arguments see `cached_forward`. The forward
        ends when the last layer has stored its keys and values, as its output is not used."""
        if self.routes is None and not self._cache.states:
            self._last = len(self._cache.keys) - 1
        with suppress(_AllStored):
            cached_forward(forward, ids, positions, self)

    def _stored(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return all keys and values that the queries may attend to."""
        keys, values = self._store(key, value)
        if not any(self._starts):
            return key, value
        keys_K, values_K = (pool[self._page_K, self._offset_K].transpose(0, 1)[None] for pool in (keys, values))
        if self._ragged:  # for each sequence, the entries that were there and those just stored
            return keys_K, values_K
        return torch.cat([key, keys_K], dim=2), torch.cat([value, values_K], dim=2)

    @cached_property
    def runs(self) -> Runs:
        """The new tokens of each sequence, as layers with a state see them."""
        begins = accumulate(self._lengths[:-1], initial=0)
        return Runs(list(zip(begins, self._lengths, strict=True)), [-1] * len(self._lengths), self._cache.device)

    def _before(self, kind: str, layer: int, index: int) -> Tensor | None:
        """Return a state of each sequence before its new tokens; None at the beginning of sequences."""
        if not any(self._starts):
            return None
        assert all(self._starts), "sequences begin together"
        state, rows = self._cache.states.of(kind, layer, index), self._rows
        assert rows is not None
        # A single token may be written in place.
        return state[rows[0] : rows[0] + 1] if len(rows) == 1 else state[rows]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._before("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._before("recurrent", layer_idx, state_idx)

    def update_conv_state(self, x: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        """Store the last tokens [1, C, N] of each sequence; return all new tokens, after those from before."""
        state = self._cache.states.of("conv", layer_idx, state_idx)
        known = self._before("conv", layer_idx, state_idx)
        before = None if known is None else known.transpose(1, 2).clone()
        state[self._rows] = self.runs.last(x[0].T, state.shape[2], before).transpose(1, 2).to(state.dtype)
        return x if before is None else torch.cat([before.flatten(0, 1).T[None].to(x.dtype), x], dim=2)

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        self._cache.states.store(state, self._rows, layer_idx, state_idx)
        return state


class DecodeStep(ForwardCache):
    """One decode step: one new token in every row.

    Args:
        rows: their pages and positions. Without a kernel, attention reads `rows.read` pages of every sequence.
    """

    def __init__(self, cache: PagedCache, rows: Rows) -> None:
        self._cache, self._table, self._position, self._read = cache, rows.table_nw, rows.position_n, rows.read
        self._layers = iter(cache.geometry.layers)
        self._schedules: dict[Any, tuple[Tensor, Tensor]] = {}

    @cached_property
    def _written(self) -> tuple[Tensor, Tensor]:
        """Page and offset that each new token is written to."""
        page, offset = self._position // self._cache.page, self._position % self._cache.page
        return self._table.gather(1, page[:, None])[:, 0].long(), offset

    @cached_property
    def routes(self) -> Recorder | None:
        """Records the experts of the new tokens."""
        return self._cache.recorder(*self._written) if self._cache.geometry.experts else None

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the new keys and values; `attend` will store them. Latents are stored now, and nothing needs to be
        expanded from them: return those of one row."""
        if not self._cache.geometry.latents:
            return key, value
        self._latents = self._cache.layer(next(self._layers))[0]
        self._latents[self._written] = torch.cat([key, value], dim=-1)[:, :, 0]
        return key[:1], value[:1]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the state of every slot, which the layer writes in place."""
        return self._cache.states.of("conv", layer_idx, state_idx)[: len(self._table)]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._cache.states.of("recurrent", layer_idx, state_idx)[: len(self._table)]

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        self._cache.states.store(state, slice(len(state)), layer_idx, state_idx)
        return state

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        keys, values = self._cache.layer(next(self._layers))
        if decoding.can_attend(query, keys, options.sinks):
            return decoding.decode_attention(query, key, value, keys, values, self._table, self._position, options)
        keys[self._written], values[self._written] = key[:, :, 0], value[:, :, 0]
        return self.attend_to(query, keys, values, options)

    def attend_to_latents(self, query: Tensor, module: Any, options: Options) -> Tensor:
        """Compute attention to the latents that `update` has stored; see `absorbed`."""
        latents, rank = self._latents, module.kv_lora_rank
        if has_kernel(*self._cache.place, latents, latents[..., :rank], query.shape[1], options):
            return absorbed(query, latents, module, partial(self.attend_to, options=options))
        latents = latents[self._table[:, : self._read]].flatten(1, 2).transpose(1, 2)
        attend = partial(masked_attention, position_nq=self._position[:, None], options=options)
        return absorbed(query, latents, module, attend)

    def attend_to(self, query: Tensor, keys: Tensor, values: Tensor, options: Options) -> Tensor:
        """Compute `attend` after the new tokens are in the layer's cache: `keys` and `values`, [pages, page, kv, d]."""
        if has_kernel(*self._cache.place, keys, values, query.shape[1] // keys.shape[2], options):
            return self.by_kernel(query, keys, values, options)[:, None]
        return self.on_copies(query, keys, values, options)

    def by_kernel(self, query: Tensor, keys: Tensor, values: Tensor, options: Options, **more: Any) -> Tensor:
        """Compute `attend_to` by a kernel that reads only the entries that each sequence has; [n, heads, d]. For `more`
        see `gpu.attention.paged_attention`."""
        return gpu.attention.paged_attention(
            query[:, :, 0], keys, values, self._table, self._position, *options, self._cache.scratch,
            schedules=self._schedules, **more,
        )  # fmt: skip

    def on_copies(self, query: Tensor, keys: Tensor, values: Tensor, options: Options) -> Tensor:
        """Compute `attend_to` in torch."""
        read = (pool[self._table[:, : self._read]].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
        return masked_attention(query, next(read), next(read), self._position[:, None], options)


def has_kernel(device: torch.device, page: int, keys: Tensor, values: Tensor, group: int, options: Options) -> bool:
    """Whether a GPU kernel reads keys and values like these, [..., d], from pages of `page` entries, if `group` query
    heads share a key head."""
    if not on_gpu(device) or not gpu.usable():
        return False
    d, v, sinking = keys.shape[-1], values.shape[-1], options.sinks is not None
    windowed, capped = options.window > 0, options.softcap > 0
    return gpu.proven("decoding", _kernel_agrees, device, keys.dtype, page, group, d, v, windowed, capped, sinking)


def _kernel_agrees(
    device: torch.device, dtype: torch.dtype, page: int, group: int, d: int, v: int, *kinds: bool
) -> bool:
    """Whether the kernel and torch agree on sequences of 6 and 701 entries, of which several programs share the longer;
    also where values are the first numbers of keys, as of latents."""
    generator, width = torch.Generator().manual_seed(0), -(-701 // page)
    shapes = (2 * width, page, 1, d), (2 * width, page, 1, v), (2, group, 1, d)
    keys, values, query = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    cache = PagedCache(Geometry((((1, d), (1, v)),), dtype), 1, page, device)
    table = torch.arange(2 * width, dtype=torch.int32, device=device).view(2, width)
    position = torch.tensor([5, 700], device=device)
    step = DecodeStep(cache, Rows(position, table, position, width))
    windowed, capped, sinking = kinds
    sinks = torch.linspace(-1, 4, group, device=device) if sinking else None
    options = Options(d**-0.5, 300 if windowed else 0, 20.0 if capped else 0.0, sinks)
    worst = ROUNDING if dtype.itemsize == 2 else 1e-4
    for k_pool, v_pool in ((keys, values), *([(keys, keys[..., :v])] if v < d else [])):
        expected = step.on_copies(query, k_pool, v_pool, options)[:, 0].float()
        for budget in (1, None):
            found = step.by_kernel(query, k_pool, v_pool, options, budget=budget).float()
            if not (found - expected).norm() < worst * expected.norm():
                return False
    return True


def decode_step(model: Any, cache: PagedCache, rows: Rows) -> Tensor:
    """Return the logits_nV of a model after each row's token."""
    ids, positions, step = rows.token_n[:, None], rows.encoded_n[:, None], DecodeStep(cache, rows)
    logits_nV: Tensor = cached_forward(model, ids, positions, step).logits[:, -1]
    return logits_nV


def masked_attention(query: Tensor, key: Tensor, value: Tensor, position_nq: Tensor, options: Options) -> Tensor:
    """Return the attention of queries at `position_nq` (int64) to the entries of their sequence, [n, q, heads, d]."""
    entry = torch.arange(key.shape[2], device=key.device)
    allowed = entry <= position_nq[:, :, None]
    if options.window:
        allowed &= entry > position_nq[:, :, None] - options.window
    if options.softcap or options.sinks is not None:
        return attend(query, key, value, allowed[:, None], options).transpose(1, 2).contiguous()
    n, heads, q, head_dim = query.shape
    groups = heads // key.shape[1]
    # The query heads of one key-value head become further queries, so that keys are not repeated in memory.
    query = query.reshape(n, key.shape[1], groups * q, head_dim)
    allowed = allowed.repeat(1, groups, 1)[:, None]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=options.scale)
    return out.reshape(n, heads, q, value.shape[3]).transpose(1, 2).contiguous()
