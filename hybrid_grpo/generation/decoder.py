"""The device side of decoding: one slot of state for every sequence, and the step that advances all of them."""

from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.fused_step import fused_step
from hybrid_grpo.generation.graphs import Capture, Graphs, read_for, reads_up_to, size_for, sizes_up_to
from hybrid_grpo.generation.paged_attention import all_follow, decode_step
from hybrid_grpo.generation.sampler import Sampler, Sampling, to_lists
from hybrid_grpo.generation.scheduler import Sequence
from hybrid_grpo.model.upload import upload

_TOKEN, _POSITION, _COUNT, _KEY = range(4)


class Decoder:
    """Up to `slots` sequences on the device, of at most `width` pages each; slots 0 to n - 1 are active.

    `capture`, if given, captures forwards as CUDA graphs. Sampling, which is only a few kernels, is not captured, so
    the graphs serve any `sampling`.
    """

    lag = 0
    """Number of steps that may be running on the device before the host reads the tokens of the oldest."""

    def __init__(
        self, model: Any, cache: PagedCache, sampling: Sampling, slots: int, width: int, capture: Capture | None = None
    ) -> None:
        self.cache, self._model, self._device = cache, model, cache.device
        self._fused = fused_step(model, cache)
        self._state_4n = torch.zeros(4, slots, dtype=torch.int64, device=self._device)
        self._table_nw = torch.zeros(slots, width, dtype=torch.int32, device=self._device)
        self._graphs = None if capture is None else Graphs(capture)
        if capture is not None:
            self.lag = 2
        self.begin(sampling)

    def begin(self, sampling: Sampling) -> None:
        """Begin a call that uses `sampling`; all slots must be free."""
        self._captured_before = len(self._graphs or ())
        self._sampler = Sampler(sampling, self._device)
        self._seen_nV: Tensor | None = None
        if self._sampler.needs_seen:
            slots, vocabulary = self._state_4n.shape[1], self._model.get_output_embeddings().weight.shape[0]
            self._seen_nV = torch.zeros(slots, vocabulary, dtype=torch.bool, device=self._device)

    @property
    def slots(self) -> int:
        return self._state_4n.shape[1]

    @property
    def captured(self) -> bool:
        """Whether no capture of a CUDA graph has failed."""
        return self._graphs is None or self._graphs.usable

    @property
    def captures(self) -> int:
        """Number of forwards captured since `begin`."""
        return len(self._graphs or ()) - self._captured_before

    def capture_all(self) -> None:
        """Capture the forward of every graph size. All slots must be free: each forward runs once on padding before its
        capture, and writes to page 0. The largest is captured first, so that the others reuse its memory."""
        slots, width = self._table_nw.shape
        for size in sizes_up_to(slots):
            for read in reads_up_to(width, self._follows):
                if self._graphs is not None and self._graphs.usable:
                    self._graphs.run((size, read), partial(self._forward, size, read))

    def insert(self, first: int, sequences: list[Sequence]) -> None:
        """Put sequences into slots, starting at `first`."""
        width, slots = self._table_nw.shape[1], slice(first, first + len(sequences))
        state = [
            [s.tokens[-1], s.position, len(s.logp), s.key, *s.pages, *[0] * (width - len(s.pages))] for s in sequences
        ]
        state_k4, table_kw = upload(state, self._device).split([4, width], dim=1)
        self._state_4n[:, slots] = state_k4.T
        self._table_nw[slots] = table_kw.int()
        self.cache.states.copy([s.state for s in sequences], list(range(first, first + len(sequences))))
        if self._seen_nV is not None:
            for slot, sequence in enumerate(sequences, first):
                self._seen_nV[slot] = False
                self._seen_nV[slot, upload(sequence.tokens, self._device)] = True

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy the state of slots `source` to slots `target`."""
        if not source:
            return
        source_k, target_k = upload([source, target], self._device)
        self._state_4n[:, target_k] = self._state_4n[:, source_k]
        self._table_nw[target_k] = self._table_nw[source_k]
        self.cache.states.copy(source, target)
        if self._seen_nV is not None:
            self._seen_nV[target_k] = self._seen_nV[source_k]

    def step(self, active: list[Sequence]) -> Any:
        """Feed each active sequence its last token and sample the next one; `read` turns the result into tokens."""
        page = self.cache.page
        grown = [(slot, s.position // page) for slot, s in enumerate(active) if s.position % page == 0]
        if grown:
            new = [[slot, column, active[slot].pages[column]] for slot, column in grown]
            slot_g, column_g, page_g = upload(new, self._device).unbind(1)
            self._table_nw[slot_g, column_g] = page_g.int()
        chosen = self._advance(len(active), self.cache.pages_for(max(s.position for s in active) + 1))
        if self._graphs is None:
            return chosen, None
        token_n, logp_n, *bits = chosen
        # One tensor, so one copy to the host: float64 holds both without loss.
        (rows_2n, *bits), copied = _to_host([torch.stack([token_n.double(), logp_n.double()]), *bits])
        return (*rows_2n, *bits), copied

    def _advance(self, n: int, read: int) -> tuple[Tensor, ...]:
        """Advance slots 0 to n - 1 (at most `read` pages each) by one token; returns what the sampler returns."""
        logits_nV = self._forward(n, read) if self._graphs is None else self._replayed(self._graphs, n, read)
        state_4n = self._state_4n[:, :n]
        seen_nV = None if self._seen_nV is None else self._seen_nV[:n]
        token_n, *others = self._sampler(logits_nV, state_4n[_KEY], state_4n[_COUNT], seen_nV)
        if seen_nV is not None:
            seen_nV.scatter_(1, token_n[:, None], True)
        state_4n[_TOKEN] = token_n
        state_4n[_POSITION : _COUNT + 1] += 1
        return token_n, *others

    def _forward(self, n: int, read: int) -> Tensor:
        """Return logits_nV of slots 0 to n - 1. Only the cache changes, at each slot's position."""
        token_n, position_n, table_nw = self._state_4n[_TOKEN, :n], self._state_4n[_POSITION, :n], self._table_nw[:n]
        if self._fused is not None:
            return self._fused(token_n, table_nw, position_n, read)
        return decode_step(self._model, self.cache, token_n, table_nw, position_n, read)

    def _replayed(self, graphs: Graphs, n: int, read: int) -> Tensor:
        """Run `_forward` as a CUDA graph; the next call overwrites the result."""
        size = size_for(n, self.slots)
        # Rows that pad the graph's size write to page 0.
        self._state_4n[:, n:size] = 0
        self._table_nw[n:size] = 0
        read = self._read_for(read)
        return graphs.run((size, read), partial(self._forward, size, read))[:n]

    def _read_for(self, pages: int) -> int:
        """Return how many pages of each sequence a captured forward reads if the longest has `pages`."""
        width = self._table_nw.shape[1]
        return width if self._follows else read_for(pages, width)

    @cached_property
    def _follows(self) -> bool:
        return all_follow(self.cache.geometry, self._device)

    @staticmethod
    def read(outcome: Any) -> tuple[list[int], list[float], list[np.ndarray | None]]:
        """Wait for a step, and return its tokens, log-probabilities and supports by slot; see `to_lists`."""
        chosen, copied = outcome
        if copied is not None:
            copied.synchronize()
        return to_lists(chosen)


def _to_host(moved: list[Tensor]) -> tuple[list[Tensor], Any]:
    """Start copies to host memory. Return them, and the event that marks their end (None if they are already done)."""
    if moved[0].device.type == "cpu":
        return [tensor.clone() for tensor in moved], None
    host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in moved]
    for target, tensor in zip(host, moved, strict=True):
        target.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied
