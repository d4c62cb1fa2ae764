"""The decode loop: a prompt is read (prefilled) once for its whole group, and finished sequences leave at once.

The last prompt token is not part of the prefill: it is the first token that each completion feeds to the decode step.
So all sampling happens in one place, and a group shares its prefill without sharing any state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation import scheduler
from hybrid_grpo.generation.attention import Prefill
from hybrid_grpo.generation.cache import Geometry, PagedCache, budget_bytes
from hybrid_grpo.generation.decoder import decoder_for
from hybrid_grpo.generation.sampler import Sampling
from hybrid_grpo.model.kernels.decoding import adopt

OnFinish = Callable[[int, int, Completion], None]
"""Called with the index of the request, the index of the sample in it, and the completion."""


PAGE = {"cpu": 32, "cuda": 256}
"""Entries of a cache page; flash-attn supports multiples of 256 only."""
PREFILL_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Default number of tokens of one prefill forward."""


@dataclass(frozen=True)
class Request:
    """A prompt and how many completions it wants."""

    prompt_ids: list[int]
    """At least one token."""
    keys: list[int]
    """Key of each completion's random stream; see `stream_key`."""
    limits: list[int] | None = None
    """Most tokens of each completion. Default: `Sampling.max_tokens` for all."""


@dataclass
class Stats:
    """What a call of `generate` did."""

    steps: int = 0
    """Forward passes of the decode loop."""
    rows: int = 0
    """Rows of these passes: one for each token sampled."""
    context: int = 0
    """Cache entries that these rows attended to."""
    prefills: int = 0
    """Prompts read, again for each sequence that had been put back."""
    preempted: int = 0
    """Sequences put back because pages had run out."""
    peak_cache_bytes: int = 0
    """Keys and values in use at the fullest moment."""


_geometries: WeakKeyDictionary[Any, Geometry] = WeakKeyDictionary()


def _prepared(model: Any) -> Geometry:
    """The cache geometry of a model; the first time, its modules also switch to the kernels they can use."""
    if model not in _geometries:
        adopt(model)
        _geometries[model] = Geometry.of(model)
    return _geometries[model]


class _Loop:
    """One call of `generate`."""

    def __init__(
        self,
        model: Any,
        requests: Sequence[Request],
        sampling: Sampling,
        max_slots: int,
        prefill_tokens: int | None,
        cache_gb: float | None,
        on_finish: OnFinish | None,
        decode: Callable[[list[int]], str] | None,
    ) -> None:
        self.model = model
        self.sampling = sampling
        self.on_finish = on_finish
        self.decode = decode
        self.finished: list[list[Completion | None]] = [[None] * len(request.keys) for request in requests]
        self.stats = Stats()
        self.device = next(model.parameters()).device
        self.prefill_tokens = prefill_tokens or PREFILL_TOKENS[self.device.type]
        geometry = _prepared(model)
        groups = [
            scheduler.Group(request.prompt_ids, deque(sequences))
            for request, sequences in zip(requests, sequences_of(requests, sampling), strict=True)
        ]
        slots = min(max_slots, sum(len(group.sequences) for group in groups))
        page = PAGE[self.device.type]
        cache = PagedCache(geometry, _pages(groups, slots, page, geometry, cache_gb, self.device), page, self.device)
        self.page_bytes = page * geometry.token_bytes
        self.schedule = scheduler.Scheduler(cache, groups, slots)
        width = max(cache.pages_for(len(s.tokens) + s.limit) for group in groups for s in group.sequences)
        self.decoder = decoder_for(model, cache, sampling, slots, width)
        self.in_flight: deque[tuple[list[scheduler.Sequence], Any]] = deque()

    def run(self) -> list[list[Completion]]:
        schedule = self.schedule
        try:
            while schedule.busy:
                self._admit()
                self._step()
                while len(self.in_flight) > self.decoder.lag or (self.in_flight and not schedule.active):
                    self._collect()
        finally:
            self.decoder.detach()
        assert schedule.cache.free == schedule.cache.pages - 1, "every page comes back"
        self.stats.preempted = schedule.preempted
        self.stats.peak_cache_bytes = schedule.cache.peak * self.page_bytes
        return [[c for c in group if c is not None] for group in self.finished]

    def _admit(self) -> None:
        """Fill the free slots, reading as many prompts as needed."""
        while True:
            if not self.schedule.ready:
                self._prefill(self.schedule.to_read(self.prefill_tokens))
            admitted, source, target = self.schedule.admit()
            if not admitted:
                return
            self.schedule.cache.copy(source, target)
            self.decoder.insert(len(self.schedule.active) - len(admitted), admitted)

    def _prefill(self, groups: list[scheduler.Group]) -> None:
        """Read all tokens but the last of the groups' prompts; a single prompt beyond the budget in several parts."""
        self.stats.prefills += len(groups)
        groups = [group for group in groups if len(group.tokens) > 1]
        if not groups:
            return
        longest = max(len(group.tokens) for group in groups) - 1
        for start in range(0, longest, self.prefill_tokens):
            parts = [group.tokens[start : min(start + self.prefill_tokens, len(group.tokens) - 1)] for group in groups]
            ids = torch.tensor([[token for part in parts for token in part]], device=self.device)
            batch = Prefill(self.schedule.cache, [group.pages for group in groups], start, list(map(len, parts)))
            self.model.base_model(
                input_ids=ids, position_ids=batch.position_1N, past_key_values=batch, use_cache=True, batch=batch
            )

    def _step(self) -> None:
        """Start sampling one token for every active sequence; a later `_collect` reads the outcome."""
        schedule = self.schedule
        # A sequence that reaches its limit ends with a step that is still running: wait for it.
        if any(s.position == s.prompt + s.limit - 1 and len(s.tokens) <= s.position for s in schedule.active):
            self._drain()
        while not schedule.make_room():
            self._drain()
            if not schedule.make_room():
                schedule.put_back()
        active = schedule.active
        if not active:
            return
        self.in_flight.append((active.copy(), self.decoder.step(active)))
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
        any_done = False
        for sequence, token, logp in zip(sequences, *self.decoder.read(outcome), strict=False):
            if sequence.done:
                continue
            if completion := sequence.add(token, logp, self.sampling, self.decode):
                any_done = True
                self.finished[sequence.request][sequence.sample] = completion
                if self.on_finish is not None:
                    self.on_finish(sequence.request, sequence.sample, completion)
        if any_done:
            done = [slot for slot, sequence in enumerate(self.schedule.active) if sequence.done]
            self.decoder.move(*self.schedule.retire(done))


def sequences_of(requests: Sequence[Request], sampling: Sampling) -> list[list[scheduler.Sequence]]:
    """The sequences that each request wants, with nothing sampled yet."""
    assert all(request.prompt_ids and request.keys for request in requests), "a prompt has tokens, a request keys"
    groups = []
    for index, request in enumerate(requests):
        prompt = request.prompt_ids
        limits = [sampling.max_tokens] * len(request.keys) if request.limits is None else request.limits
        streams = enumerate(zip(request.keys, limits, strict=True))
        groups.append(
            [scheduler.Sequence(index, k, key, list(prompt), len(prompt), most) for k, (key, most) in streams]
        )
    return groups


def _pages(
    groups: list[scheduler.Group],
    slots: int,
    page: int,
    geometry: Geometry,
    cache_gb: float | None,
    device: torch.device,
) -> int:
    """Pages for `slots` sequences and their prompts at the longest, or as many as memory allows."""
    needs = sorted((-(-(len(s.tokens) + s.limit) // page) + 1 for g in groups for s in g.sequences), reverse=True)
    bytes_ = budget_bytes(cache_gb, device)
    allowed = int(bytes_ / (page * geometry.token_bytes))
    # Two more: page 0, and the shared page in which the prompt ends.
    least = needs[0] + 2
    if allowed < least:
        gib = least * page * geometry.token_bytes / 2**30
        raise UserError(
            f"rollout.cache_gb: {bytes_ / 2**30:.3g} GiB hold {allowed * page} tokens of keys and values, but the"
            f" longest prompt and completion need {gib:.3g} GiB: give more, or lower rollout.max_completion_tokens"
        )
    return min(allowed, sum(needs[:slots]) + 2)


@torch.inference_mode()
def generate(
    model: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    max_slots: int = 256,
    prefill_tokens: int | None = None,
    cache_gb: float | None = None,
    on_finish: OnFinish | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> tuple[list[list[Completion]], Stats]:
    """Complete every request.

    Args:
        model: a transformers causal language model in eval mode whose attention is `ATTENTION`, without hooks that
            communicate: nothing in here waits for another rank.
        sampling: how tokens are chosen, and when a completion ends.
        max_slots: most completions decoded at the same time.
        prefill_tokens: prompt tokens of one prefill forward; a longer prompt takes several. Default: `PREFILL_TOKENS`.
        cache_gb: GiB of keys and values. Default: a fraction of the free memory. When too small for `max_slots`
            sequences, fewer are decoded at a time, or some are put back and decoded again later.
        on_finish: called as soon as a completion is finished.
        decode: tokens to text; required for `Sampling.stop_strings`.

    Returns:
        The completions in the order of `requests` and their keys, with empty texts, and what the call did.

    Raises:
        UserError: `cache_gb`, or the free memory, cannot hold the longest single sequence.
    """
    if not requests:
        return [], Stats()
    loop = _Loop(model, requests, sampling, max_slots, prefill_tokens, cache_gb, on_finish, decode)
    return loop.run(), loop.stats
