"""Attention over the paged cache: `Prefill` for the tokens of prompts, `DecodeStep` for one token of every sequence.

Each is both the `Batch` that `routed_attention` uses and the cache that the forward sees. A layer passes what it would
cache to `update`, which returns it as it is. Pages hold the keys and values that `attend` receives: they may be made
from what is cached, or belong to an earlier layer. Where a layer caches latents, pages hold those.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_grpo.generation.cache import Geometry, PagedCache, cached_forward
from hybrid_grpo.model.attention import (
    PAGED_OPTIONS,
    ROUNDING,
    Options,
    Segments,
    attend,
    flash_attn_with_kvcache,
    has_flash,
    has_paged_kernel,
    has_ragged_kernel,
    log_sum_exp,
    on_gpu,
    ragged_attention,
    varlen_kernel,
    varlen_takes,
    with_sinks,
)
from hybrid_grpo.model.kernels import decoding, gpu
from hybrid_grpo.model.latents import absorbed
from hybrid_grpo.model.routing import Recorder
from hybrid_grpo.model.runs import Runs
from hybrid_grpo.model.upload import upload


class Prefill:
    """A prefill without padding: one row has the new tokens of several sequences, after those in the cache.

    Args:
        pages: the pages of each sequence, enough for all its tokens up to the end of this forward.
        starts: the number of entries that each sequence already has in the cache; 0 for a prompt.
        lengths: the number of new tokens of each sequence, at least one.
        states: the row of each sequence's states in the cache. Default: the model has none.
        known: the experts of the new tokens, if the tokens were read before; see `Recorder`.
    """

    def __init__(
        self,
        cache: PagedCache,
        pages: list[list[int]],
        starts: list[int],
        lengths: list[int],
        states: Sequence[int] = (),
        known: np.ndarray | None = None,
    ) -> None:
        device = cache.device
        self._rows = upload(list(states), device) if cache.states else None
        self._cache, self._layers = cache, iter(cache.geometry.layers)
        self._starts, self._lengths = starts, lengths
        ends = [start + n for start, n in zip(starts, lengths, strict=True)]
        self._page_N, self._offset_N = self._places(pages, starts, ends)
        self.routes = cache.recorder(self._page_N, self._offset_N, known)
        position_N = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        self.position_1N = upload(position_N[None], device)
        begins = list(accumulate(lengths, initial=0))
        self._ragged = any(starts) and on_gpu(device)
        if self._ragged:
            self._page_K, self._offset_K = self._places(pages, [0] * len(ends), ends)
            self._ends, self._longest = ends, (max(lengths), max(ends))
            begins_2S = np.array([begins, [*accumulate(ends, initial=0)]], dtype=np.int32)
            query_begins, key_begins = upload(begins_2S, device)
            self._begins = query_begins, key_begins
            return
        # The keys of the new tokens are followed by those that each sequence has in the cache.
        own, places = list(zip(begins, lengths, strict=False)), accumulate(starts, initial=sum(lengths))
        self._segments = Segments(own, list(zip(places, starts, strict=False)), device)
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

    def get_seq_length(self, layer: int = 0) -> int:
        # transformers asks for it; positions are always given explicitly.
        return max(self._starts)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """See `routed_attention`."""
        if not self._cache.geometry.latents:
            key, value = self._stored(key, value)
        if not self._ragged:
            return self._segments.attend(query, key, value, options)
        if has_ragged_kernel(query, options.softcap, options.sinks is not None):
            q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
            return ragged_attention(q, k, v, self._begins, self._longest, options)[None]
        positions = self.position_1N.split(self._lengths, dim=1)
        split = query.split(self._lengths, 2), key.split(self._ends, 2), value.split(self._ends, 2), positions
        parts = [masked_attention(*part, options) for part in zip(*split, strict=True)]
        return torch.cat(parts, dim=1)

    def _stored(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return all keys and values that the queries may attend to."""
        keys, values = self._cache.layer(next(self._layers))
        keys[self._page_N, self._offset_N] = key[0].transpose(0, 1)
        values[self._page_N, self._offset_N] = value[0].transpose(0, 1)
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
        """Store the last tokens [1, C, N] of each sequence; return all new tokens, behind those from before."""
        state = self._cache.states.of("conv", layer_idx, state_idx)
        known = self._before("conv", layer_idx, state_idx)
        before = None if known is None else known.transpose(1, 2).clone()
        state[self._rows] = self.runs.last(x[0].T, state.shape[2], before).transpose(1, 2).to(state.dtype)
        return x if before is None else torch.cat([before.flatten(0, 1).T[None].to(x.dtype), x], dim=2)

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        self._cache.states.store(state, self._rows, layer_idx, state_idx)
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class DecodeStep:
    """One decode step: one new token for every active sequence.

    Args:
        table: int32 [n, width], the pages of each sequence, padded with page 0.
        position: int64 [n], of the new tokens.
        read: number of pages of the longest sequence; attention that ignores lengths reads as many of every sequence.
    """

    def __init__(self, cache: PagedCache, table: Tensor, position: Tensor, read: int) -> None:
        self._cache, self._table, self._position, self._read = cache, table, position, read
        self._layers = iter(cache.geometry.layers)

    @cached_property
    def _used(self) -> Tensor:
        """Number of entries of each sequence, including the new one."""
        return (self._position + 1).int()

    @cached_property
    def _written(self) -> tuple[Tensor, Tensor]:
        """Page and offset that each new token is written to."""
        page, offset = self._position // self._cache.page, self._position % self._cache.page
        return self._table.gather(1, page[:, None])[:, 0].long(), offset

    @cached_property
    def routes(self) -> Recorder | None:
        """Records the experts of the new tokens."""
        return self._cache.recorder(*self._written) if self._cache.geometry.experts else None

    @cached_property
    def _begins(self) -> tuple[Tensor, Tensor]:
        """Offsets of each sequence's first query and first key, as if all pages of the table were read."""
        begins = torch.arange(len(self._table) + 1, dtype=torch.int32, device=self._table.device)
        return begins, begins * (self._table.shape[1] * self._cache.page)

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

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer: int = 0) -> int:
        # transformers asks for it; positions are always given explicitly.
        return self._read * self._cache.page

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """See `routed_attention`."""
        keys, values = self._cache.layer(next(self._layers))
        if decoding.can_attend(query, keys, options.sinks):
            return decoding.decode_attention(query, key, value, keys, values, self._table, self._position, *options)
        keys[self._written], values[self._written] = key[:, :, 0], value[:, :, 0]
        return self.attend_to(keys, values, query, options)

    def attend_to_latents(self, query: Tensor, module: Any, options: Options) -> Tensor:
        """Compute attention to the latents that `update` has stored; see `absorbed`."""
        latents = self._latents[self._table[:, : self._read]].flatten(1, 2).transpose(1, 2)
        attend = partial(masked_attention, position_nq=self._position[:, None], options=options)
        return absorbed(query, latents, module, attend)

    def attend_to(self, keys: Tensor, values: Tensor, query: Tensor, options: Options) -> Tensor:
        """Compute `attend` after the new tokens are in the layer's cache: `keys` and `values`, [pages, page, kv, d]."""
        follows = follows_lengths(keys, options.softcap, options.sinks is not None)
        return (self.by_kernel if follows else self.on_copies)(keys, values, query, options)

    def on_copies(self, keys: Tensor, values: Tensor, query: Tensor, options: Options) -> Tensor:
        """Compute `attend_to` in torch."""
        read = (pool[self._table[:, : self._read]].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
        return masked_attention(query, next(read), next(read), self._position[:, None], options)

    def by_kernel(self, keys: Tensor, values: Tensor, query: Tensor, options: Options) -> Tensor:
        """Compute `attend_to` by a kernel that reads only as many entries as each sequence has."""
        attend = self._flash if has_flash(keys) else self._varlen
        out, lse_n1H = attend(query, keys, values, options)
        return out if options.sinks is None else with_sinks(out, lse_n1H, options.sinks)

    def _flash(self, query: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        scale, window, softcap, _ = options
        out, lse_nH1 = flash_attn_with_kvcache(
            query.transpose(1, 2),
            keys,
            values,
            cache_seqlens=self._used,
            block_table=self._table,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
            softcap=softcap,
            return_softmax_lse=True,
        )
        return out, lse_nH1.transpose(1, 2)

    def _varlen(self, query: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        (n, _, _, d), window = query.shape, options.window
        width = self._table.shape[1] * self._cache.page
        # Split over the keys, the kernel leaves rows of a paged cache unwritten (pytorch issue 194167).
        whole: dict[str, Any] = {"num_splits": 1} if varlen_takes("num_splits") else {}
        # A single query at the end needs no causal mask, and without one the kernel computes the query heads of a key
        # head together. But then it writes the log-sum-exp of a paged cache in another order than it returns it in.
        after = -1 if not window and options.sinks is None else 0
        out, lse_Hn = varlen_kernel()(
            query.transpose(1, 2).reshape(n, -1, d),
            keys,
            values,
            *self._begins,
            1,
            width,
            scale=options.scale,
            return_aux=log_sum_exp(),
            window_size=(window - 1 if window else -1, after),
            enable_gqa=True,
            seqused_k=self._used,
            block_table=self._table,
            **whole,
        )
        return out[:, None], lse_Hn.T[:, None]


def follows_lengths(keys: Tensor, softcap: float, has_sinks: bool) -> bool:
    """Whether a GPU kernel reads from a layer's cache only as many entries as each sequence has."""
    if not has_paged_kernel(keys) or (softcap and not has_flash(keys)):
        return False
    case = keys.device, keys.dtype, keys.shape[-1], has_flash(keys)
    return not has_sinks or gpu.proven("decoding with sinks", _sinks_agree, *case, kernel="a kernel for pages")


def _sinks_agree(device: torch.device, dtype: torch.dtype, head_dim: int, flash: bool) -> bool:
    """Whether the kernel and torch agree on sinks, for two sequences with two query heads for each key head."""
    generator, page = torch.Generator().manual_seed(0), 256
    shapes = (2, page, 2, head_dim), (2, page, 2, head_dim), (2, 4, 1, head_dim)
    keys, values, query = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    cache = PagedCache(Geometry((((2, head_dim), (2, head_dim)),), dtype), 1, page, device)
    table, position = torch.tensor([[1], [0]], dtype=torch.int32, device=device), torch.tensor([5, 200], device=device)
    options = Options(head_dim**-0.5, sinks=torch.linspace(-1, 4, 4, device=device))
    step = DecodeStep(cache, table, position, 1)
    found, expected = (way(keys, values, query, options).float() for way in (step.by_kernel, step.on_copies))
    return bool((found - expected).norm() < ROUNDING * expected.norm())


def might_follow(half: bool, softcap: float) -> bool:
    """Whether `follows_lengths` is expected to be true on a GPU, given the packages that are installed here."""
    return half and (flash_attn_with_kvcache is not None or (varlen_takes(*PAGED_OPTIONS) and not softcap))


def all_follow(geometry: Geometry, device: torch.device) -> bool:
    """Whether `follows_lengths` is true for every layer."""
    for layer, options in zip(geometry.layers, geometry.attention, strict=True):
        if geometry.latents:
            return False
        keys = torch.empty(1, 1, *geometry.shapes[layer][0], dtype=geometry.dtype, device=device)
        if not follows_lengths(keys, options.softcap, geometry.sinks):
            return False
    return True


def decode_step(
    model: Any, cache: PagedCache, token_n: Tensor, table_nw: Tensor, position_n: Tensor, read: int
) -> Tensor:
    """Return the logits_nV of a model after each sequence's token (int64 [n]); see `DecodeStep`."""
    batch = DecodeStep(cache, table_nw, position_n, read)
    logits_nV: Tensor = cached_forward(model, token_n[:, None], position_n[:, None], batch).logits[:, -1]
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
