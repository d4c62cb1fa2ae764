"""The decode loop: a prompt is prefilled once for its whole group, and finished sequences leave at once.

The last prompt token is not part of the prefill: it is the first token that each completion feeds to the decode step.
So all sampling happens in one place, and a group shares its prefill without sharing any state.
"""

import sys
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation.cache import Geometry, PagedCache, cache_for, recorded_by
from hybrid_grpo.generation.decoder import Decoder, capture_on
from hybrid_grpo.generation.fused_step import fused_step
from hybrid_grpo.generation.graphs import bytes_of
from hybrid_grpo.generation.paged_attention import PAGE, Prefill
from hybrid_grpo.generation.sampler import Sampling
from hybrid_grpo.generation.scheduler import Group, Scheduler, groups_of
from hybrid_grpo.generation.sequence import Callbacks, Request, Sequence, Stats, lengths_of, sequences_of
from hybrid_grpo.generation.shape_probe import geometry_of
from hybrid_grpo.generation.workspace import Workspace
from hybrid_grpo.model.kernels.decoding import install_kernels
from hybrid_grpo.model.layers import install_fused_layers
from hybrid_grpo.model.reading import joined_positions
from hybrid_grpo.model.states import install_state_functions
from hybrid_grpo.model.towers import text_forward
from hybrid_grpo.model.upload import upload

PATIENCE_S = 0.2
"""Longest wait for answers to turns between two calls of `on_step`, in seconds."""

_geometries: WeakKeyDictionary[Any, Geometry] = WeakKeyDictionary()


def _prepared(model: Any) -> Geometry:
    """Return the cache geometry of a model. On the first call, its modules also switch to the kernels they can use."""
    if model not in _geometries:
        install_kernels(model)
        install_state_functions(model)
        install_fused_layers(model, next(model.parameters()))
        _geometries[model] = geometry_of(model)
    return _geometries[model]


def _reserved(model: Any, geometry: Geometry, captured: bool, slots: int) -> int:
    """Return the bytes that decoding `slots` sequences needs besides the cache: logits and graphs."""
    row_bytes = model.get_output_embeddings().weight.shape[0] * geometry.dtype.itemsize
    return 2 * slots * row_bytes + (bytes_of(slots) if captured else 0)


class _Loop:
    """The state of one call of `generate`."""

    def __init__(
        self, model: Any, schedule: Scheduler, decoder: Decoder, prefill_tokens: int, sampling: Sampling,
        callbacks: Callbacks,
    ) -> None:  # fmt: skip
        self.model, self.schedule, self.decoder = model, schedule, decoder
        self.prefill_tokens, self.sampling, self.reading = prefill_tokens, sampling, callbacks.reading
        # With the cache alone: a method of this object would be a cycle, which keeps the memory until it is collected.
        self.callbacks = replace(callbacks, recorded=partial(recorded_by, schedule.cache, {}))
        self.stats = Stats()
        self.in_flight: deque[tuple[list[tuple[Sequence, int]], Any]] = deque()
        """For each running step, its sequences, each with the number of its turn, and the outcome to be read."""
        self._shares = callbacks.turns is not None and callbacks.turns.begins_sequences
        # A state cannot be taken back: where turns continue from one, no step may be begun after their end.
        self.max_in_flight = 0 if callbacks.turns is not None and decoder.cache.states else decoder.max_in_flight

    def run(self) -> Stats:
        schedule, cache = self.schedule, self.schedule.cache
        turns = self.callbacks.turns
        while (schedule.busy or (turns is not None and turns.is_open)) and not self._should_stop():
            if self.callbacks.on_step:
                self.callbacks.on_step()
            self._take_answers()
            self._admit()
            self._step()
            while self.in_flight and (len(self.in_flight) > self.max_in_flight or not schedule.active):
                self._collect()
        assert cache.free == cache.pages - 1, "every page comes back"
        self.stats.preempted = schedule.preempted
        self.stats.captures = self.decoder.captures
        self.stats.peak_cache_bytes = cache.peak * cache.page * cache.geometry.token_bytes + cache.states.bytes
        return self.stats

    def _should_stop(self) -> bool:
        """Whether the sequences that have not ended are left open; if so, they are completed as such."""
        stop = self.callbacks.should_stop
        if stop is None or not stop(lambda: min((s.new_tokens for s in self._unfinished()), default=sys.maxsize)):
            return False
        self._drain()
        for sequence in self._unfinished():
            sequence.end("open", self.callbacks)
        self.schedule.abandon()
        return True

    def _unfinished(self) -> Iterator[Sequence]:
        schedule = self.schedule
        yield from schedule.active
        for group in (*schedule.ready, *schedule.pending):
            yield from group.sequences

    def _take_answers(self) -> None:
        """Begin the turns whose answers have arrived; wait for one if there is nothing else to do."""
        schedule, turns = self.schedule, self.callbacks.turns
        if turns is None or not (schedule.waiting or turns.is_open):
            return
        idle = not (schedule.active or schedule.can_start or self.in_flight)
        for asked, observation in turns.answers(PATIENCE_S if idle else 0.0):
            if isinstance(asked, Sequence):
                schedule.waiting[asked.key] = asked
            key = asked.key if isinstance(asked, Sequence) else asked
            sequence, finish = schedule.answer(key, observation)
            if not isinstance(observation, str):
                sequence.position_offset += self.reading.offset(observation)
            if finish is not None:
                sequence.end(finish, self.callbacks)

    def _admit(self) -> None:
        """Fill the free slots, reading as many answers and prompts as needed."""
        schedule = self.schedule
        while True:
            if going_on := schedule.resume(self.prefill_tokens):
                self.stats.answers += len(going_on)
                self._read(going_on, [s.position for s in going_on])
                for sequence in going_on:
                    sequence.position = len(sequence.tokens) - 1
                self.decoder.insert(len(schedule.active) - len(going_on), going_on)
                for sequence in going_on:
                    schedule.cache.states.release(sequence.state)
                continue
            if not schedule.ready:
                groups = schedule.next_prefill_batch(self.prefill_tokens)
                self.stats.prefills += len(groups)
                for theirs, own in (pair for group in groups for pair in group.copied):
                    schedule.cache.copy([theirs], [own])
                self._read(groups, [group.known for group in groups])
                for group in groups if self._shares else ():
                    schedule.cache.publish(group.tokens[:-1], group.pages)
            admitted, source, target = schedule.admit()
            if admitted:
                schedule.cache.copy(source, target)
                self.decoder.insert(len(schedule.active) - len(admitted), admitted)
            elif schedule.active or self.in_flight or not (schedule.can_start and schedule.reclaim()):
                return

    def _read(self, holders: Collection[Sequence | Group], starts: list[int]) -> None:
        """Prefill each sequence's tokens from its start up to, but not including, the last one. A single sequence that
        exceeds the budget is read in several parts."""
        rows = [
            (holder.pages, holder.tokens[:-1], start, holder)
            for holder, start in zip(holders, starts, strict=True)
            if len(holder.tokens) - 1 > start
        ]
        self.schedule.cache.states.zero([holder.state for holder in holders if len(holder.tokens) == 1])
        longest = max((len(ids) - start for _, ids, start, _ in rows), default=0)
        done = 0
        while done < longest:
            end = done + self.prefill_tokens
            if end < longest:
                end = self.reading.whole_until(rows[0][1], rows[0][2] + end) - rows[0][2]
            parts = [ids[start + done : start + end] for _, ids, start, _ in rows]
            begins, lengths = [start + done for _, _, start, _ in rows], list(map(len, parts))
            owned, done = [pages for pages, *_ in rows], end
            if not self.reading.sees and self.decoder.prefill(owned, begins, parts):
                continue
            read = [token for part in parts for token in part]
            states = [holder.state for *_, holder in rows]
            recorded = [
                None if (of := holder.recorded) is None else of[begin:]
                for (*_, holder), begin in zip(rows, begins, strict=True)
            ]
            batch = Prefill(self.schedule.cache, owned, begins, lengths, states, recorded, self.reading.blocks(read))
            of_rows, device = zip(rows, begins, lengths, strict=True), self.schedule.cache.device
            found = [self.reading.positions(ids[: at + n])[0][:, at:] for (_, ids, *_), at, n in of_rows]
            forward = partial(text_forward, self.model, shown=self.reading.shown(read, device))
            batch.read(forward, upload([read], device), upload(joined_positions(found), device))

    def _step(self) -> None:
        """Start sampling one token for every active sequence; a later `_collect` reads the outcome."""
        schedule = self.schedule
        # A sequence that reaches a limit ends with a step that is still running: wait for it.
        if any(len(s.tokens) < s.turn_end <= s.position + 1 for s in schedule.active):
            self._drain()
        while not schedule.reserve():
            self._drain()
            if not schedule.reserve():
                schedule.preempt()
        active = schedule.active
        if not active:
            return
        self.in_flight.append(([(s, s.turn) for s in active], self.decoder.step(active)))
        self.stats.steps += 1
        self.stats.rows += len(active)
        for sequence in active:
            sequence.position += 1
            self.stats.context += sequence.position

    def _drain(self) -> None:
        while self.in_flight:
            self._collect()

    def _collect(self) -> None:
        """Read the tokens of the oldest running step, and remove the sequences that end with them."""
        sequences, outcome = self.in_flight.popleft()
        for (sequence, turn), token, logp, kept in zip(sequences, *self.decoder.read(outcome), strict=True):
            # Steps after the end of a turn were started before the end was known.
            if sequence.is_open and sequence.turn == turn:
                sequence.add(token, logp, kept, self.sampling, self.callbacks)
        done = [slot for slot, s in enumerate(self.schedule.active) if s.completion or s.waits]
        for slot in done if self._shares else ():
            of = self.schedule.active[slot]
            self.schedule.cache.publish(of.tokens[: of.position], of.pages)
        self.decoder.move(*self.schedule.retire(done))


def _decoder(
    model: Any, sampling: Sampling, callbacks: Callbacks, longest: list[int], slots: int, prefill_tokens: int | None,
    cache_gb: float | None, workspace: Workspace | None,
) -> Decoder:  # fmt: skip
    """Return the decoder for a call of `generate`, with a cache for sequences of the lengths `longest` (descending)."""
    device, waiting = next(model.parameters()).device, callbacks.turns is not None
    has_offsets = callbacks.reading.has_offsets
    geometry, capture, page = _prepared(model), capture_on(device), PAGE
    if capture is not None:
        # Test here whether these steps are right, while there is memory for the test.
        fused_step(model, PagedCache(geometry, 2, page, device))
    reserved = partial(_reserved, model, geometry, capture is not None)
    new_cache = partial(cache_for, geometry, page, cache_gb, device, prefill_tokens, reserved, waiting=waiting)
    if workspace is not None and capture is not None:
        return workspace.decoder(model, sampling, longest[0], new_cache, capture, has_offsets=has_offsets)
    cache = new_cache(longest, slots)
    decoder = Decoder(
        model, cache, sampling, cache.slots, cache.pages_for(longest[0]), capture, has_offsets=has_offsets
    )
    if capture is not None and cache.states:
        # A capture runs a forward once more, which would change the states of sequences.
        decoder.capture_all()
    return decoder


@torch.inference_mode()
def generate(
    model: Any, requests: list[Request], sampling: Sampling, callbacks: Callbacks | None = None, *,
    max_slots: int = 256, prefill_tokens: int | None = None, cache_gb: float | None = None,
    workspace: Workspace | None = None,
) -> tuple[list[list[Completion]], Stats]:  # fmt: skip
    """Return the completions of every request, in the order of `requests` and their keys, and statistics of the call.
    Raises UserError if `cache_gb`, or the free memory, cannot hold the longest single sequence.

    Args:
        model: a transformers causal language model in eval mode whose attention is `ATTENTION`, without hooks that
            communicate, since generation does not wait for other ranks.
        max_slots: most completions that are decoded at the same time.
        prefill_tokens: tokens of one prefill forward; a longer prompt takes several. Default: `PREFILL_TOKENS`, or less
            if memory is short.
        cache_gb: GiB of keys and values. Default: a fraction of the free memory. If it is too small for `max_slots`
            sequences, fewer are decoded at a time, or some are preempted and read again later.
        workspace: keeps the memory for further calls with the same model; `cache_gb` then counts only when memory is
            allocated. Default: all memory is freed at the end.
    """
    if not requests:
        return [], Stats()
    callbacks = callbacks or Callbacks()
    turns = callbacks.turns
    sequences = sequences_of(requests, sampling, callbacks.reading)
    has_limits = all(request.max_total_tokens for request in requests)
    assert turns is None or (callbacks.should_stop is None and has_limits), "turns end, and have a limit in all"
    longest = lengths_of(sequences, several_turns=turns is not None)
    slots = min(max_slots, len(longest))
    decoder = _decoder(model, sampling, callbacks, longest, slots, prefill_tokens, cache_gb, workspace)
    begins = turns is not None and turns.begins_sequences
    groups = () if begins else chain.from_iterable(map(groups_of, sequences))
    schedule = Scheduler(decoder.cache, groups, min(slots, decoder.slots), decoder.page_lookahead)
    loop = _Loop(model, schedule, decoder, prefill_tokens or decoder.cache.prefill_tokens, sampling, callbacks)
    if turns is not None:
        turns.begin(requests)
    stats = loop.run()
    if turns is not None and begins:
        return turns.completions(), stats
    return [[s.completion for s in group if s.completion] for group in sequences], stats
