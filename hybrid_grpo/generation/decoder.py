"""The device side of decoding: one slot of state for every sequence, and the step that advances all of them."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hybrid_grpo.generation.attention import decode_step, follows_lengths
from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.fused import fused
from hybrid_grpo.generation.graphs import Capture, Graphs, on_cuda, size_for
from hybrid_grpo.generation.sampler import Sampler, Sampling
from hybrid_grpo.generation.scheduler import Sequence

_TOKEN, _POSITION, _COUNT, _KEY = range(4)


class Decoder:
    """`slots` slots of sequences on the device, of at most `width` pages each; slots 0 to n - 1 are active.

    `capture` captures steps as CUDA graphs; without it steps run without graphs.
    """

    lag = 0
    """Steps that may run on the device while the host prepares the next: the host reads their tokens later."""

    def __init__(
        self, model: Any, cache: PagedCache, sampling: Sampling, slots: int, width: int, capture: Capture | None = None
    ) -> None:
        self.attach(model, cache)
        self._device = cache.device
        self._sampler = Sampler(sampling, self._device)
        self._state_4n = torch.zeros(4, slots, dtype=torch.int64, device=self._device)
        self._table_nw = torch.zeros(slots, width, dtype=torch.int32, device=self._device)
        self._seen_nV: Tensor | None = None
        if self._sampler.needs_seen:
            vocabulary = model.get_output_embeddings().weight.shape[0]
            self._seen_nV = torch.zeros(slots, vocabulary, dtype=torch.bool, device=self._device)
        self._graphs = None if capture is None else Graphs(capture)

    def attach(self, model: Any, cache: PagedCache) -> None:
        """Set the model and the cache to decode with."""
        self._model: Any = model
        self._cache: Any = cache
        self._fused = fused(model, cache)

    def detach(self) -> None:
        """Drop model and cache: a decoder that is kept for its graphs must not keep them alive."""
        self._model = self._cache = self._fused = None

    def insert(self, first: int, sequences: list[Sequence]) -> None:
        """Put sequences into slots, starting at `first`."""
        state = [
            [s.tokens[-1] for s in sequences],
            [s.position for s in sequences],
            [len(s.logp) for s in sequences],
            [s.key for s in sequences],
        ]
        slots = slice(first, first + len(sequences))
        self._state_4n[:, slots] = torch.tensor(state, dtype=torch.int64).to(self._device)
        width = self._table_nw.shape[1]
        rows = [s.pages + [0] * (width - len(s.pages)) for s in sequences]
        self._table_nw[slots] = torch.tensor(rows, dtype=torch.int32).to(self._device)
        if self._seen_nV is not None:
            for slot, sequence in enumerate(sequences, first):
                self._seen_nV[slot] = False
                self._seen_nV[slot, torch.tensor(sequence.tokens, device=self._device)] = True

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy the state of slots `source` to slots `target`."""
        if not source:
            return
        self._state_4n[:, target] = self._state_4n[:, source]
        self._table_nw[target] = self._table_nw[source]
        if self._seen_nV is not None:
            self._seen_nV[target] = self._seen_nV[source]

    def step(self, active: list[Sequence]) -> Any:
        """Feed each active sequence its last token and sample the next; `read` turns the result into tokens."""
        page = self._cache.page
        grown = [slot for slot, s in enumerate(active) if s.position % page == 0]
        if grown:
            columns = [active[slot].position // page for slot in grown]
            pages = [active[slot].pages[column] for slot, column in zip(grown, columns, strict=True)]
            self._table_nw[grown, columns] = torch.tensor(pages, dtype=torch.int32).to(self._device)
        n, read = len(active), self._cache.pages_for(max(s.position for s in active) + 1)
        if self._graphs is None:
            return self._advance(n, read), None
        slots, width = self._table_nw.shape
        size = size_for(n, slots)
        # Rows that pad the graph's size write to page 0.
        self._state_4n[:, n:size] = 0
        self._table_nw[n:size] = 0
        read = width if follows_lengths(self._cache.keys[0]) else min(1 << (read - 1).bit_length(), width)
        # One tensor, so one copy to the host: float64 holds both without loss.
        packed = self._graphs.run((size, read), lambda: torch.stack([t.double() for t in self._advance(size, read)]))
        return _to_host(packed[:, :n])

    def _advance(self, n: int, read: int) -> tuple[Tensor, Tensor]:
        """Advance slots 0 to n - 1 by a token: tokens int64 [n], and their log-probabilities [n]."""
        state_4n = self._state_4n[:, :n]
        token_n, position_n, table_nw = state_4n[_TOKEN], state_4n[_POSITION], self._table_nw[:n]
        if self._fused is not None:
            logits_nV = self._fused(token_n, table_nw, position_n, read)
        else:
            logits_nV = decode_step(self._model, self._cache, token_n, table_nw, position_n.clone(), read)
        seen_nV = None if self._seen_nV is None else self._seen_nV[:n]
        token_n, logp_n = self._sampler(logits_nV, state_4n[_KEY], state_4n[_COUNT], seen_nV)
        if seen_nV is not None:
            seen_nV.scatter_(1, token_n[:, None], True)
        state_4n[_TOKEN] = token_n
        state_4n[_POSITION : _COUNT + 1] += 1
        return token_n, logp_n

    @staticmethod
    def read(outcome: Any) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of a step, by slot. Waits for the step."""
        rows, copied = outcome
        if copied is not None:
            copied.synchronize()
        tokens, logp = (row.tolist() for row in rows)
        return list(map(int, tokens)), logp


def _to_host(packed: Tensor) -> tuple[Tensor, Any]:
    """Start a copy to host memory; returns it and the event that marks its end (None: the copy is done)."""
    if packed.device.type == "cpu":
        return packed.clone(), None
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


_kept: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Decoder]] = WeakKeyDictionary()


def decoder_for(model: Any, cache: PagedCache, sampling: Sampling, slots: int, width: int) -> Decoder:
    """A decoder. On a GPU the one of the last call, with its graphs, if all memory they use is at the same address."""
    if cache.device.type != "cuda":
        return Decoder(model, cache, sampling, slots, width)
    memory = [*model.parameters(), *cache.keys, *cache.values]
    identity = (sampling, slots, width, *(tensor.data_ptr() for tensor in memory))
    kept = _kept.get(model)
    if kept is not None and kept[0] == identity:
        kept[1].attach(model, cache)
        return kept[1]
    decoder = Decoder(model, cache, sampling, slots, width, capture=on_cuda)
    decoder.lag = 2
    _kept[model] = identity, decoder
    return decoder
