"""The device side of decoding: one slot of state for every sequence, and the step that advances all of them."""

import warnings
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_grpo.generation.cache import PagedCache, Rows
from hybrid_grpo.generation.cpu_step import CpuStep
from hybrid_grpo.generation.fused_step import fused_step
from hybrid_grpo.generation.graphs import Capture, Graphs, on_cuda, size_for, sizes_up_to
from hybrid_grpo.generation.paged_attention import decode_step
from hybrid_grpo.generation.sampler import Sampler, Sampling, on_device, to_lists
from hybrid_grpo.generation.sequence import Sequence, new_text
from hybrid_grpo.model.kernels.decoding import Alike
from hybrid_grpo.model.upload import upload

_TOKEN, _POSITION, _COUNT, _KEY, _ACTIVE, _OFFSET = range(6)
_SHORT = 128
"""Up to this many entries of a sequence, reading is faster by the kernel that decodes than by a forward on a CPU."""
_SAMPLINGS = 4
"""Samplings whose graphs are kept: those of rollouts, of evaluations, and of what else uses the model."""


class Decoder:
    """Up to `slots` sequences on the device, of at most `width` pages each; slots 0 to n - 1 are active.

    With `has_offsets`, positions that are encoded may differ from those in the cache, as after pictures.

    `capture`, if given, captures steps as CUDA graphs: the forward, which serves any sampling, and the choice of tokens
    for each sampling. Between two steps the host then adds pages to the table, rarely, and copies what was chosen.
    """

    max_in_flight = 0
    """Number of steps that may be running on the device before the host reads the tokens of the oldest."""
    page_lookahead = 0
    """Entries for which a sequence gets pages before it needs them, so that the table changes rarely."""

    def __init__(
        self, model: Any, cache: PagedCache, sampling: Sampling, slots: int, width: int, capture: Capture | None = None,
        *, has_offsets: bool = False,
    ) -> None:  # fmt: skip
        self.cache, self._model, self._device, self._capture = cache, model, cache.device, capture
        self._has_offsets = has_offsets
        self._fused: Any = fused_step(model, cache)
        if self._fused is None and any(hasattr(parameter, "quant_state") for parameter in model.parameters()):
            slow = f"packed weights are slow: {type(model).__name__} has no step by kernels that reads them"
            warnings.warn(f"{slow}: set rollout.weights to merged", stacklevel=2)
        self._state_6n = torch.zeros(6, slots, dtype=torch.int64, device=self._device)
        self._table_nw = torch.zeros(slots, width, dtype=torch.int32, device=self._device)
        self._filled = 0
        """Slots from here on are zero: a row that pads a graph's size stands still, and writes to page 0."""
        self._graphs = None if capture is None else Graphs(capture)
        self._choices: dict[Sampling, tuple[Sampler, Graphs]] = {}
        self._logits_nV: Tensor | None = None
        """What all captured forwards write to."""
        self._seen_nV: Tensor | None = None
        if capture is not None:
            self.max_in_flight, self.page_lookahead = 2, 32
        self.begin(sampling)

    def begin(self, sampling: Sampling) -> None:
        """Begin a call that uses `sampling`; all slots must be free."""
        self._captured_before = len(self._graphs or ())
        self._clear(0)
        if self._capture is None:
            self._sampler = Sampler(sampling, self._device)
        else:
            kind = on_device(sampling)
            kept = self._choices.pop(kind, None) or (Sampler(sampling, self._device), Graphs(self._capture))
            self._choices[kind] = self._sampler, self._chosen = kept
            if len(self._choices) > _SAMPLINGS:
                del self._choices[next(iter(self._choices))]
        if self._sampler.needs_seen and self._seen_nV is None:
            vocabulary = self._model.get_output_embeddings().weight.shape[0]
            self._seen_nV = torch.zeros(self.slots, vocabulary, dtype=torch.bool, device=self._device)

    @property
    def slots(self) -> int:
        return self._state_6n.shape[1]

    @property
    def captured(self) -> bool:
        """Whether no capture of a forward has failed."""
        return self._graphs is None or self._graphs.usable

    @property
    def captures(self) -> int:
        """Number of forwards captured since `begin`."""
        return len(self._graphs or ()) - self._captured_before

    def capture_all(self) -> None:
        """Capture the steps of every graph size. All slots must be free: each step runs once on padding before its
        capture, and writes to page 0. The largest is captured first, so that the others reuse its memory."""
        for size in sizes_up_to(self.slots):
            if self._graphs is not None and self._graphs.usable:
                self._replayed(self._graphs, size)

    def _clear(self, first: int) -> None:
        """Empty the slots from `first` on."""
        if first < self._filled:
            self._state_6n[:, first : self._filled].zero_()
            self._table_nw[first : self._filled].zero_()
        self._filled = first

    def insert(self, first: int, sequences: list[Sequence]) -> None:
        """Put sequences into slots, starting at `first`."""
        width, slots = self._table_nw.shape[1], slice(first, first + len(sequences))
        state = [[*_state_6(s), *s.pages, *[0] * (width - len(s.pages))] for s in sequences]
        state_k6, table_kw = upload(state, self._device).split([6, width], dim=1)
        self._state_6n[:, slots] = state_k6.T
        self._table_nw[slots] = table_kw.int()
        self._filled = max(self._filled, slots.stop)
        for sequence in sequences:
            sequence.known_pages = len(sequence.pages)
        self.cache.states.copy([s.state for s in sequences], list(range(first, first + len(sequences))))
        if self._sampler.needs_seen and self._seen_nV is not None:
            for slot, sequence in enumerate(sequences, first):
                self._seen_nV[slot] = False
                self._seen_nV[slot, upload([t for t in sequence.tokens if t >= 0], self._device)] = True

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy the state of slots `source` to slots `target`."""
        if not source:
            return
        source_k, target_k = upload([source, target], self._device)
        self._state_6n[:, target_k] = self._state_6n[:, source_k]
        self._table_nw[target_k] = self._table_nw[source_k]
        self.cache.states.copy(source, target)
        if self._seen_nV is not None:
            self._seen_nV[target_k] = self._seen_nV[source_k]

    def prefill(self, pages: list[list[int]], begins: list[int], parts: list[list[int]]) -> bool:
        """Store the keys and values of sequences' new tokens if the fused step is faster at it than the model's
        forward. Return whether it is."""
        longest = max(begin + len(part) for begin, part in zip(begins, parts, strict=True))
        if not isinstance(self._fused, CpuStep) or self.cache.states or longest > _SHORT:
            return False
        width = self.cache.pages_for(longest)
        table = torch.tensor([own[:width] + [0] * (width - len(own)) for own in pages], dtype=torch.int32)
        rows = [(token, row, begins[row] + at) for row, part in enumerate(parts) for at, token in enumerate(part)]
        token_N, row_N, position_N = torch.tensor(rows).T.contiguous()
        self._fused.read(token_N, table[row_N], position_N)
        return True

    def step(self, active: list[Sequence]) -> Any:
        """Feed each active sequence its last token and sample the next one; `read` turns the result into tokens."""
        n = len(active)
        self._clear(n)
        grown = [(slot, s) for slot, s in enumerate(active) if len(s.pages) > s.known_pages]
        if grown:
            new = [[slot, i, s.pages[i]] for slot, s in grown for i in range(s.known_pages, len(s.pages))]
            slot_g, column_g, page_g = upload(new, self._device).unbind(1)
            self._table_nw[slot_g, column_g] = page_g.int()
            for _, sequence in grown:
                sequence.known_pages = len(sequence.pages)
        if self._graphs is None:
            read = self.cache.pages_for(max(s.position for s in active) + 1)
            alike = self._alike(active)
            return self._choose(self._forward(n, read, alike=alike), n, alike), None
        return _to_host([part[:n] for part in self._replayed(self._graphs, size_for(n, self.slots))])

    def _alike(self, active: list[Sequence]) -> Alike | None:
        """Return which slots have the same text, so that it is decoded once; None if none have, or the step cannot."""
        if self.max_in_flight or self.cache.states or not isinstance(self._fused, CpuStep):
            return None
        texts: dict[tuple[int, int], list[int]] = {}
        for slot, sequence in enumerate(active):
            texts.setdefault((sequence.text, sequence.tokens[-1]), []).append(slot)
        for slots in texts.values():
            text = new_text()
            for slot in slots:
                active[slot].text = text
        if len(texts) == len(active):
            return None
        begins = list(accumulate(map(len, texts.values()), initial=0))
        return Alike(torch.tensor(begins), torch.tensor(list(chain.from_iterable(texts.values()))))

    def _forward(self, n: int, read: int, out: Tensor | None = None, alike: Alike | None = None) -> Tensor:
        """Return logits_nV of slots 0 to n - 1 (or of the texts that are `alike`), of at most `read` pages each, in
        `out` where the step can write to it. Only the cache changes, at each slot's position."""
        token_n, position_n, table_nw = self._state_6n[_TOKEN, :n], self._state_6n[_POSITION, :n], self._table_nw[:n]
        rotary_n = position_n + self._state_6n[_OFFSET, :n] if self._has_offsets else position_n
        rows = Rows(token_n, table_nw, position_n, read, rotary_n)
        if alike is not None:
            return self._fused(rows, alike)
        if self._fused is not None:
            return self._fused(rows) if out is None else self._fused(rows, out)
        return decode_step(self._model, self.cache, rows)

    def _choose(self, logits_nV: Tensor, n: int, alike: Alike | None = None) -> tuple[Tensor, ...]:
        """Advance slots 0 to n - 1 by one token; returns what the sampler returns."""
        state_6n = self._state_6n[:, :n]
        seen_nV = self._seen_nV[:n] if self._sampler.needs_seen and self._seen_nV is not None else None
        token_n, *others = self._sampler(logits_nV, state_6n[_KEY], state_6n[_COUNT], seen_nV, alike)
        if seen_nV is not None:
            seen_nV.scatter_(1, token_n[:, None], True)
        state_6n[_TOKEN] = token_n
        state_6n[_POSITION : _COUNT + 1].add_(state_6n[_ACTIVE])
        return token_n, *others

    def _replayed(self, graphs: Graphs, size: int) -> tuple[Tensor, ...]:
        """Advance slots 0 to size - 1 by CUDA graphs; the next call overwrites the result."""
        (logits_nV,) = graphs.run(size, partial(self._forward_to_logits, size))
        choose = partial(self._choose, logits_nV, size)
        return tuple(self._chosen.run(size, choose)) if graphs.usable else choose()

    def _forward_to_logits(self, size: int) -> tuple[Tensor]:
        kept_nV = None if self._logits_nV is None else self._logits_nV[:size]
        logits_nV = self._forward(size, self._table_nw.shape[1], kept_nV)
        if kept_nV is None:
            self._logits_nV = logits_nV.new_empty(self.slots, logits_nV.shape[1])
            kept_nV = self._logits_nV[:size]
        if logits_nV is not kept_nV:
            kept_nV.copy_(logits_nV)
        return (kept_nV,)

    @staticmethod
    def read(outcome: Any) -> tuple[list[int], list[float], list[np.ndarray | None]]:
        """Wait for a step, and return its tokens, log-probabilities and supports by slot; see `to_lists`."""
        chosen, copied = outcome
        if copied is not None:
            copied.synchronize()
        return to_lists(chosen)


def _state_6(sequence: Sequence) -> list[int]:
    """Return what the device knows of a sequence besides its pages, in the order of `_TOKEN` to `_OFFSET`."""
    s = sequence
    return [s.tokens[-1], s.position, len(s.logp) - s.stream_begin, s.stream, 1, s.position_offset]


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


def capture_on(device: torch.device) -> Capture | None:
    """Return a function that captures steps on a device into a new memory pool; None if the device cannot do this."""
    # A pool whose graphs are gone cannot always be opened again (vLLM issue 53682), so each decoder has its own.
    return partial(on_cuda, pool=torch.cuda.graph_pool_handle()) if device.type == "cuda" else None
