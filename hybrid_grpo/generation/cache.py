"""The paged cache of keys and values: memory grows with the tokens, and a group shares the pages of its prompt.

A page holds some consecutive entries (tokens) of a sequence, in every layer. A sequence has a list of page numbers, and
sequences with common entries share pages. No sequence owns page 0: padding points there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.packing import begin_alike
from hybrid_grpo.generation.state_pool import StatePool, StateShape, rows_for
from hybrid_grpo.model.ragged_attention import Options
from hybrid_grpo.model.routing import Recorder, Routing, routed
from hybrid_grpo.model.sidecars import Sidecar
from hybrid_grpo.model.upload import upload
from hybrid_grpo.model.visual_tokens import whole_before

if TYPE_CHECKING:
    from hybrid_grpo.generation.sequence import Sequence

GPU_SHARE = 0.95
"""Fraction of the free GPU memory that the cache may take, after deducting what decoding itself will take."""
MARGIN = 0.03
"""Fraction of a GPU's memory that stays free, for what a plan does not know."""
_HOST_SHARE = 0.5
"""Fraction of the available host memory that the cache may take."""
PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Default number of tokens per prefill forward."""
_PREFILL_SHARE = 0.1
"""The default prefill is halved, down to a CPU's, until it takes at most this fraction of the free GPU memory."""


@dataclass(frozen=True)
class Geometry:
    """Shapes and dtype of one token's keys and values, and the parameters of each layer's attention."""

    shapes: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    """For each layer with keys and values of its own, (heads, head_dim) of its keys and of its values."""
    dtype: torch.dtype
    attention: tuple[Options, ...] = ()
    """The options of each call of attention in a forward, in order, without their sinks."""
    reading: int = 0
    """Bytes that a prefill needs for each token, in addition to the cache."""
    unpacked: int = 0
    """Bytes that it needs for a weight that it unpacks."""
    shared: tuple[int, ...] = ()
    """For each call of attention, the index in `shapes` of its keys and values. Default: each has its own."""
    latents: bool = False
    """Whether pages hold latents, [rank + rope] for each token, in place of keys; values then have no width."""
    states: tuple[StateShape, ...] = ()
    """The states of a sequence: those of its recurrences and convolutions."""
    experts: tuple[int, int, int] | None = None
    """Layers with experts, experts of a token in each, and experts to choose from; None if they are not recorded."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states."""
        return sum(state.bytes for state in self.states)

    @property
    def layers(self) -> tuple[int, ...]:
        """For each call of attention in a forward, in order, the index in `shapes` of the keys and values it reads."""
        return self.shared or tuple(range(len(self.shapes)))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers, and of the numbers of its experts."""
        numbers = sum(heads * d for layer in self.shapes for heads, d in layer)
        layers, k, _ = self.experts or (0, 0, 0)
        return numbers * self.dtype.itemsize + layers * k * self.numbering.itemsize

    @property
    def numbering(self) -> torch.dtype:
        """The dtype that the numbers of experts are recorded in."""
        return torch.uint8 if self.experts and self.experts[2] <= 256 else torch.int16


class ForwardCache:
    """What transformers asks of a cache beside keys, values and states. Positions are always given explicitly."""

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def cached_forward(forward: Any, ids: Tensor, positions: Tensor, batch: Any) -> Any:
    """Return what `forward`, of a transformers model or its base, returns for the new tokens `ids`; `ids` and
    `positions` are int64 [rows, n]. It gets `batch` as its cache, and as the `Batch` of `routed_attention`."""
    with routed(batch.routes):
        return forward(input_ids=ids, position_ids=positions, use_cache=True, cache=batch, batch=batch)


class Rows(NamedTuple):
    """The rows of a decode step: one new token of every active sequence."""

    token_n: Tensor
    """int64."""
    table_nw: Tensor
    """int32: the pages of each row's sequence, padded with page 0."""
    position_n: Tensor
    """int64: the entry of the cache that the token becomes."""
    read: int
    """Number of pages of the longest sequence; see `DecodeStep`."""
    rotary_n: Tensor | None = None
    """int64: the positions that are encoded. Default: those in the cache."""

    @property
    def encoded_n(self) -> Tensor:
        return self.position_n if self.rotary_n is None else self.rotary_n


class PagedCache:
    """The pages of all layers, with their numbers of owners: `pages` pages (page 0 included) of `page` entries; and the
    states of up to `slots` sequences that are decoded, in `rows` rows; see `StatePool`."""

    def __init__(
        self, geometry: Geometry, pages: int, page: int, device: torch.device, slots: int = 0, rows: int = 0
    ) -> None:
        self.geometry, self.pages, self.page, self.device, self.slots = geometry, pages, page, device, slots
        self.states = StatePool(geometry.states, slots, rows, device)
        self.prefill_tokens = PREFILL_TOKENS["cpu"]
        """Tokens of one prefill forward that fit in memory next to the cache."""
        self.keys = [_zeros((pages, page, *key), geometry.dtype, device) for key, _ in geometry.shapes]
        self.values = [_zeros((pages, page, *value), geometry.dtype, device) for _, value in geometry.shapes]
        self.scratch: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Memory of kernels whose programs add up parts; see `kernels.gpu.attention.Scratch`."""
        layers, k, _ = geometry.experts or (0, 0, 0)
        self._experts = [_zeros((pages, page, layers, k), geometry.numbering, device)] if layers else []
        self._free_all()

    @property
    def place(self) -> tuple[torch.device, int]:
        """Device, and entries of a page."""
        return self.device, self.page

    def recorder(self, page_S: Tensor, offset_S: Tensor, known: np.ndarray | None = None) -> Recorder | None:
        """Return what records the experts of tokens at these places; None if none are recorded."""
        return Recorder(self._experts[0], page_S, offset_S, known) if self._experts else None

    def recorded(self, pages: list[int], entries: int) -> np.ndarray | None:
        """Return the experts of the first entries of a sequence, [entries, layers, k]; None if none were recorded."""
        found = [pool[pages].flatten(0, 1)[:entries].cpu().numpy() for pool in self._experts]
        return found[0] if found else None

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a layer, each [pages, page, heads, head_dim]."""
        return self.keys[index], self.values[index]

    def clear(self) -> None:
        """Free all pages and set their entries to zero, as in a new cache; see `_zeros`."""
        for pool in self.keys + self.values:
            pool.zero_()
        self.states.clear()
        self._free_all()

    def _free_all(self) -> None:
        # The lowest numbers are taken first, so that host memory that is never needed stays untouched.
        self._free = list(range(self.pages - 1, 0, -1))
        self._owners = [0] * self.pages
        self._published: dict[int, dict[tuple[int, ...], int]] = {}
        """Pages that may be found, by the page before each, 0 for the first, and its tokens."""
        self._names: dict[int, tuple[int, tuple[int, ...]]] = {}
        """By these pages, the page before each and its tokens."""
        self.peak = 0
        """Most pages in use at one time."""

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, entries: int) -> int:
        return -(-entries // self.page)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, which must be free, for a new owner."""
        assert count <= len(self._free), "more pages are taken than are free"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        self.peak = max(self.peak, self.pages - 1 - len(self._free))
        return taken

    def share(self, pages: list[int]) -> None:
        """Add an owner to each page."""
        for page in pages:
            assert self._owners[page], "a page without an owner cannot be shared"
            self._owners[page] += 1

    def release(self, pages: list[int]) -> None:
        """Remove an owner from each page; a page without owners is free again."""
        for page in reversed(pages):
            assert self._owners[page], "a page is given back once"
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
                self._hide(page)

    def publish(self, tokens: list[int], pages: list[int]) -> None:
        """Let `find` return the pages of a sequence that has read `tokens`, for as long as it owns them."""
        before = 0
        for page, own in zip(pages, self._divided(tokens), strict=False):
            # What follows another sequence's page could outlive that page.
            if self._published.setdefault(before, {}).setdefault(own, page) != page:
                return
            if self._names.get(page) != (before, own):
                self._hide(page)
                self._names[page] = before, own
            before = page

    def _hide(self, page: int) -> None:
        before, own = self._names.pop(page, (page, ()))
        self._published.get(before, {}).pop(own, None)

    def find(self, tokens: list[int]) -> tuple[list[int], int]:
        """Return published pages that begin with these tokens, and how many tokens they have in common, with no picture
        divided: the last page may continue otherwise. There are none if the model has states, which pages lack."""
        found, common = list[int](), 0
        for own in self._divided(tokens) if self._published and not self.states else ():
            pages = self._published.get(found[-1] if found else 0, {})
            candidates = [own] if own in pages else pages
            alike, other = max(((begin_alike(own, other), other) for other in candidates), default=(0, own))
            if alike:
                found.append(pages[other])
            common += alike
            if alike < self.page:
                break
        common = whole_before(tokens, common) if common else 0
        return found[: self.pages_for(common)], common

    def _divided(self, tokens: list[int]) -> Iterator[tuple[int, ...]]:
        """Yield the tokens of each page."""
        return (tuple(tokens[at : at + self.page]) for at in range(0, len(tokens), self.page))

    def copy(self, source: list[int], target: list[int]) -> None:
        if source:
            from_, to = upload([source, target], self.device)
            for pool in self.keys + self.values + self._experts:
                pool.index_copy_(0, to, pool.index_select(0, from_))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Zeros, since a masked entry still enters the product with the values as 0 * entry, so it must not be NaN. On the
    # host, numpy gets zeros from the system without writing them: pages that are never used take no memory.
    if device.type != "cpu" or not all(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)


def prefill_that_fits(wish: int | None, on_gpu: bool, token_bytes: int, free: int) -> int:
    """Return the tokens of one prefill: `wish`, or the default, halved until it takes little enough of `free`."""
    least = PREFILL_TOKENS["cpu"]
    tokens = wish or PREFILL_TOKENS["cuda" if on_gpu else "cpu"]
    while not wish and tokens > least and tokens * token_bytes > _PREFILL_SHARE * free:
        tokens //= 2
    return tokens


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that decoding may take on the device now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Blocks that torch holds and no tensor uses are free too, but not those of CUDA graphs, which have pools of
        # their own: the common pool is (0, 0).
        segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == device.index]
        common = [s for s in segments if tuple(s["segment_pool_id"]) == (0, 0)]
        return int(free + sum(s["total_size"] - s["allocated_size"] for s in common) - MARGIN * total)
    return int(_HOST_SHARE * psutil.virtual_memory().available)


def cache_for(
    geometry: Geometry, page: int, cache_gb: float | None, device: torch.device, prefill_tokens: int | None,
    reserved: Callable[[int], int], longest: list[int], slots: int, *, waiting: bool = False,
) -> PagedCache:  # fmt: skip
    """Create a cache for the `slots` longest sequences at full length, or the largest one that memory allows.

    `longest` lists the maximum tokens of each sequence, prompt included, in descending order. On a GPU, room for a
    prefill and `reserved(slots)` is kept. `waiting` says whether sequences may wait for answers between turns. Raises
    UserError if the longest sequence does not fit.
    """
    needs = [-(-tokens // page) + 1 for tokens in longest]
    on_gpu, page_bytes = device.type == "cuda", page * geometry.token_bytes
    free = free_bytes(device)
    prefill = prefill_that_fits(prefill_tokens, on_gpu, geometry.reading, free)
    reserve = min(prefill, sum(longest)) * geometry.reading + geometry.unpacked + reserved(slots) if on_gpu else 0
    bytes_ = int(GPU_SHARE * max(0, free - reserve) if on_gpu else free) if cache_gb is None else int(cache_gb * 2**30)
    # States take at most half; then fewer sequences are decoded at a time.
    while slots > 1 and rows_for(slots, waiting=waiting) * geometry.state_bytes > bytes_ / 2:
        slots -= 1
    rows = rows_for(slots, waiting=waiting)
    bytes_ -= rows * geometry.state_bytes
    allowed = int(bytes_ / page_bytes) if page_bytes else sum(needs) + 2
    # Two more: page 0, and the shared page in which the prompt ends.
    least = needs[0] + 2
    if allowed < least:
        raise UserError(
            f"rollout.cache_gb: {bytes_ / 2**30:.3g} GiB hold {allowed * page} tokens of keys and values, but the"
            f" longest prompt and completion need {least * page_bytes / 2**30:.3g} GiB: give more, or lower"
            " rollout.max_completion_tokens"
        )
    cache = PagedCache(geometry, min(allowed, sum(needs[:slots]) + 2), page, device, slots, rows)
    cache.prefill_tokens = prefill
    return cache


def recorded_by(cache: PagedCache, prompts: dict[int, np.ndarray], sequence: Sequence) -> tuple[Sidecar, ...]:
    """Return what was recorded for a sequence whose turn has ended. `prompts` keeps what `cache` has of each request's
    prompt, as it was for the completion that ended first."""
    found, prompt = sequence.recorded, sequence.prompt
    if sequence.pages:
        found = cache.recorded(sequence.pages, len(sequence.tokens) - 1)
    if found is None:
        return sequence.masks
    of_prompt = prompts.setdefault(sequence.request, found[:prompt].copy())
    return *sequence.masks, Routing(of_prompt, found[prompt:].copy())
