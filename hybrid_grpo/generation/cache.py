"""The paged cache of keys and values: memory grows with the tokens, and a group shares the pages of its prompt.

A page holds some consecutive entries (tokens) of a sequence, in every layer. A sequence has a list of page numbers, and
sequences with common entries share pages. No sequence owns page 0: padding points there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.model.memory_tracker import MemoryTracker
from hybrid_grpo.model.upload import upload

GPU_SHARE = 0.95
"""Fraction of the free GPU memory that the cache may take, after deducting what decoding itself will take."""
_HOST_SHARE = 0.5
"""Fraction of the available host memory that the cache may take."""
PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Default number of tokens per prefill forward."""
_PREFILL_SHARE = 0.1
"""The default prefill is halved, down to a CPU's, until it takes at most this fraction of the free GPU memory."""
_PROBE_TOKENS = 64


@dataclass(frozen=True)
class Geometry:
    """Shapes and dtype of one token's keys and values, and the parameters of each layer's attention."""

    shapes: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    """For each layer, (heads, head_dim) of its keys and of its values."""
    dtype: torch.dtype
    attention: tuple[tuple[float, int, float], ...] = ()
    """(scale, window, softcap) of each layer's attention; see `Batch.attend`."""
    reading: int = 0
    """Bytes that a prefill needs for each token, in addition to the cache."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        numbers = sum(heads * d for layer in self.shapes for heads, d in layer)
        return numbers * torch.empty(0, dtype=self.dtype).element_size()

    @classmethod
    def of(cls, model: Any) -> Geometry:
        """Measure a model with a forward of a few tokens, since architectures name these sizes differently. Raises
        UserError if a layer attends to other keys and values than it caches."""
        seen = _Seen(type(model).__name__)
        ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=next(model.parameters()).device)
        with torch.no_grad(), MemoryTracker((*model.parameters(), *model.buffers(), ids)) as tracker:
            cached_forward(model.base_model, ids, ids, seen)
        return cls(tuple(seen.shapes), seen.dtype, tuple(seen.attention), -(-tracker.peak // _PROBE_TOKENS))


def cached_forward(model: Any, ids: Tensor, positions: Tensor, batch: Any) -> Any:
    """Return the output of a transformers model for the new tokens `ids`; `ids` and `positions` are int64 [rows, n].
    The forward receives `batch` twice: as its cache, and as the `Batch` that `routed_attention` uses."""
    kind: Any = type(model)
    given = {"batch": batch, cache_keyword(kind): batch}
    return model(input_ids=ids, position_ids=positions, use_cache=True, **given)


@functools.cache
def cache_keyword(model: Any) -> str:
    """Return the name of the cache argument in the forward of a model's class; transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _Seen:
    """Stands in for a cache and records the shapes of a forward's keys and values."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shapes: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self.attention: list[tuple[float, int, float]] = []
        self.dtype = torch.float32

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        assert layer == len(self.shapes)
        self.dtype = key.dtype
        self.shapes.append(((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])))
        return key, value

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
        self.attention.append((scale, window, softcap))
        attended = (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])
        if not self.shapes or attended != self.shapes[-1]:
            raise UserError(
                f"policy.model: {self.name} attends to keys and values other than those it caches:"
                " set rollout.decoder: transformers"
            )
        n, heads, q, _ = query.shape
        return query.new_zeros(n, q, heads, value.shape[3])


class PagedCache:
    """The pages of all layers, with their numbers of owners: `pages` pages (page 0 included) of `page` entries."""

    def __init__(self, geometry: Geometry, pages: int, page: int, device: torch.device) -> None:
        self.geometry, self.pages, self.page, self.device = geometry, pages, page, device
        self.prefill_tokens = PREFILL_TOKENS["cpu"]
        """Tokens of one prefill forward that fit in memory next to the cache."""
        self.keys = [_zeros((pages, page, *key), geometry.dtype, device) for key, _ in geometry.shapes]
        self.values = [_zeros((pages, page, *value), geometry.dtype, device) for _, value in geometry.shapes]
        self._free_all()

    def clear(self) -> None:
        """Free all pages and set their entries to zero, as in a new cache; see `_zeros`."""
        for pool in self.keys + self.values:
            pool.zero_()
        self._free_all()

    def _free_all(self) -> None:
        # The lowest numbers are taken first, so that host memory that is never needed stays untouched.
        self._free = list(range(self.pages - 1, 0, -1))
        self._owners = [0] * self.pages
        self.peak = 0
        """Most pages in use at one time."""

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, entries: int) -> int:
        return -(-entries // self.page)

    def take(self, count: int) -> list[int]:
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

    def give_back(self, pages: list[int]) -> None:
        """Remove an owner from each page; a page without owners is free again."""
        for page in reversed(pages):
            assert self._owners[page], "a page is given back once"
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def copy(self, source: list[int], target: list[int]) -> None:
        if source:
            from_, to = upload([source, target], self.device)
            for pool in self.keys + self.values:
                pool.index_copy_(0, to, pool.index_select(0, from_))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Zeros, since a masked entry still enters the product with the values as 0 * entry, so it must not be NaN. On the
    # host, numpy gets zeros from the system without writing them: pages that are never used take no memory.
    if device.type != "cpu":
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
        free, _ = torch.cuda.mem_get_info(device)
        # Blocks that torch holds and no tensor uses are free too, but not those of CUDA graphs, which have pools of
        # their own: the common pool is (0, 0).
        segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == device.index]
        common = [s for s in segments if tuple(s["segment_pool_id"]) == (0, 0)]
        return int(free + sum(s["total_size"] - s["allocated_size"] for s in common))
    return int(_HOST_SHARE * psutil.virtual_memory().available)


def cache_for(
    geometry: Geometry,
    page: int,
    cache_gb: float | None,
    device: torch.device,
    prefill_tokens: int | None,
    reserved: Callable[[int, int], int],
    longest: list[int],
    slots: int,
) -> PagedCache:
    """Create a cache for the `slots` longest sequences at full length, or the largest one that memory allows.

    `longest` lists the maximum tokens of each sequence, prompt included, in descending order. On a GPU, room for a
    prefill and `reserved(slots, pages of the longest)` is kept. Raises UserError if the longest sequence does not fit.
    """
    needs = [-(-tokens // page) + 1 for tokens in longest]
    on_gpu, page_bytes = device.type == "cuda", page * geometry.token_bytes
    free = free_bytes(device)
    prefill = prefill_that_fits(prefill_tokens, on_gpu, geometry.reading, free)
    reserve = min(prefill, sum(longest)) * geometry.reading + reserved(slots, needs[0] - 1) if on_gpu else 0
    bytes_ = int(GPU_SHARE * max(0, free - reserve) if on_gpu else free) if cache_gb is None else int(cache_gb * 2**30)
    allowed = int(bytes_ / page_bytes)
    # Two more: page 0, and the shared page in which the prompt ends.
    least = needs[0] + 2
    if allowed < least:
        raise UserError(
            f"rollout.cache_gb: {bytes_ / 2**30:.3g} GiB hold {allowed * page} tokens of keys and values, but the"
            f" longest prompt and completion need {least * page_bytes / 2**30:.3g} GiB: give more, or lower"
            " rollout.max_completion_tokens"
        )
    cache = PagedCache(geometry, min(allowed, sum(needs[:slots]) + 2), page, device)
    cache.prefill_tokens = prefill
    return cache
