"""Keys and values in pages: memory follows the tokens, and a prompt's pages are shared by its whole group.

A page holds a few consecutive entries of one sequence, in every layer. A sequence is a list of page numbers; a page
may belong to several sequences, which then have these entries in common. Page 0 belongs to nobody: rows and
columns that exist for their shape alone point there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from hybrid_grpo.config.errors import UserError

_GPU_SHARE = 0.9
"""Of the free memory; the rest is for activations of prefills and logits."""
_HOST_SHARE = 0.5


@dataclass(frozen=True)
class Geometry:
    """What one token takes in every layer."""

    shapes: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    """By layer, (heads, head_dim) of the keys and of the values."""
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, all layers together."""
        numbers = sum(heads * d for layer in self.shapes for heads, d in layer)
        return numbers * torch.empty(0, dtype=self.dtype).element_size()

    @classmethod
    def of(cls, model: Any) -> Geometry:
        """Seen from a forward of one token: no two architectures spell it alike in their configuration.

        Raises:
            UserError: attention is over something else than what is cached.
        """
        seen = _Seen(type(model).__name__)
        token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        model.base_model(input_ids=token, position_ids=token, past_key_values=seen, use_cache=True, batch=seen)
        return cls(tuple(seen.shapes), seen.dtype)


class _Seen:
    """Notes the shapes of the keys and values of a forward."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shapes: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self.dtype = torch.float32

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        assert layer == len(self.shapes)
        self.dtype = key.dtype
        self.shapes.append(((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])))
        return key, value

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        attended = (key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])
        if not self.shapes or attended != self.shapes[-1]:
            raise UserError(
                f"policy.model: {self.name} attends to other keys and values than it caches:"
                " set rollout.decoder: transformers"
            )
        return query.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2)


class PagedCache:
    """The pages of all layers, and who has which.

    Args:
        geometry: what a token takes.
        pages: how many there are, page 0 included.
        page: entries of a page.
        device: where they live.
    """

    def __init__(self, geometry: Geometry, pages: int, page: int, device: torch.device) -> None:
        self.geometry = geometry
        self.pages = pages
        self.page = page
        self.keys = [_zeros((pages, page, *key), geometry.dtype, device) for key, _ in geometry.shapes]
        self.values = [_zeros((pages, page, *value), geometry.dtype, device) for _, value in geometry.shapes]
        # The lowest numbers go out first and come back first: host memory that was never used stays untouched.
        self._free = list(range(pages - 1, 0, -1))
        self._owners = [0] * pages
        self.peak = 0
        """Most pages that were in use at one time."""

    @property
    def free(self) -> int:
        """Pages nobody has."""
        return len(self._free)

    def pages_for(self, entries: int) -> int:
        """Pages that `entries` fill."""
        return -(-entries // self.page)

    def take(self, count: int) -> list[int]:
        """Pages for a new owner; there must be as many."""
        assert count <= len(self._free), "more pages than there are"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._owners[page] = 1
        self.peak = max(self.peak, self.pages - 1 - len(self._free))
        return taken

    def share(self, pages: list[int]) -> None:
        """Give pages one more owner."""
        for page in pages:
            assert self._owners[page], "a page without an owner cannot be shared"
            self._owners[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Take an owner off pages; those without one are free."""
        for page in reversed(pages):
            assert self._owners[page], "a page is given back once"
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def copy(self, source: list[int], target: list[int]) -> None:
        """Copy whole pages."""
        if source:
            from_, to = (torch.tensor(pages, device=self.keys[0].device) for pages in (source, target))
            for pool in self.keys + self.values:
                pool.index_copy_(0, to, pool.index_select(0, from_))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since a masked entry still meets the value product as 0 * entry; in host memory, as numpy asks the
    system for them: what is never written takes no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)


def budget_bytes(cache_gb: float | None, device: torch.device) -> int:
    """Bytes for the cache: `cache_gb` GiB, or a share of what is free on the device now."""
    if cache_gb is not None:
        return int(cache_gb * 2**30)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(_GPU_SHARE * (free + held))
    return int(_HOST_SHARE * psutil.virtual_memory().available)
