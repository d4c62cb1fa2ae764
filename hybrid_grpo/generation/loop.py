"""The decode loop: a prompt is read (prefilled) once for its whole group, and finished sequences leave at once.

The last prompt token is not part of the prefill: it is the first token that each completion feeds to the decode step.
So all sampling happens in one place, and a group shares its prefill without sharing any state.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation.attention import Prefill
from hybrid_grpo.generation.cache import Geometry, cache_for
from hybrid_grpo.generation.decoder import Decoder
from hybrid_grpo.generation.graphs import capture_on
from hybrid_grpo.generation.sampler import Sampling
from hybrid_grpo.generation.scheduler import Group, OnFinish, OnStep, OnToken, Scheduler, Sequence
from hybrid_grpo.generation.workspace import Workspace
from hybrid_grpo.model.kernels.decoding import adopt
from hybrid_grpo.model.upload import upload

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
    captures: int = 0
    """Forwards captured as CUDA graphs."""


_geometries: WeakKeyDictionary[Any, Geometry] = WeakKeyDictionary()


def _prepared(model: Any) -> Geometry:
    """The cache geometry of a model; the first time, its modules also switch to the kernels they can use."""
    if model not in _geometries:
        adopt(model)
        _geometries[model] = Geometry.of(model)
    return _geometries[model]


class _Loop:
    """One call of `generate`; `add` appends a token and its log-probability to a sequence."""

    def __init__(
        self,
        model: Any,
        schedule: Scheduler,
        decoder: Decoder,
        prefill_tokens: int,
        add: Callable[[Sequence, int, float], None],
    ) -> None:
        self.model, self.schedule, self.decoder = model, schedule, decoder
        self.prefill_tokens, self.add = prefill_tokens, add
        self.stats = Stats()
        self.in_flight: deque[tuple[list[Sequence], Any]] = deque()

    def run(self, on_step: OnStep | None) -> Stats:
        schedule, cache = self.schedule, self.schedule.cache
        while schedule.busy:
            if on_step:
                on_step()
            self._admit()
            self._step()
            while len(self.in_flight) > self.decoder.lag or (self.in_flight and not schedule.active):
                self._collect()
        assert cache.free == cache.pages - 1, "every page comes back"
        self.stats.preempted = schedule.preempted
        self.stats.captures = self.decoder.captures
        self.stats.peak_cache_bytes = cache.peak * cache.page * cache.geometry.token_bytes
        return self.stats

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

    def _prefill(self, groups: list[Group]) -> None:
        """Read all tokens but the last of the groups' prompts; a single prompt beyond the budget in several parts."""
        self.stats.prefills += len(groups)
        cache, groups = self.schedule.cache, [group for group in groups if len(group.tokens) > 1]
        longest = max((len(group.tokens) - 1 for group in groups), default=0)
        for start in range(0, longest, self.prefill_tokens):
            parts = [group.tokens[:-1][start : start + self.prefill_tokens] for group in groups]
            ids = upload([[token for part in parts for token in part]], cache.device)
            batch = Prefill(cache, [group.pages for group in groups], start, list(map(len, parts)))
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
        for sequence, token, logp in zip(sequences, *self.decoder.read(outcome), strict=False):
            if sequence.completion is None:
                self.add(sequence, token, logp)
        done = [slot for slot, sequence in enumerate(self.schedule.active) if sequence.completion]
        self.decoder.move(*self.schedule.retire(done))


def sequences_of(requests: Iterable[Request], sampling: Sampling) -> list[list[Sequence]]:
    """The sequences that each request wants, with nothing sampled yet."""
    groups = []
    for index, request in enumerate(requests):
        assert request.prompt_ids and request.keys, "a prompt has tokens, a request keys"
        prompt, limits = request.prompt_ids, request.limits or [sampling.max_tokens] * len(request.keys)
        streams = enumerate(zip(request.keys, limits, strict=True))
        groups.append([Sequence(index, k, key, list(prompt), len(prompt), limit) for k, (key, limit) in streams])
    return groups


@torch.inference_mode()
def generate(
    model: Any,
    requests: list[Request],
    sampling: Sampling,
    *,
    max_slots: int = 256,
    prefill_tokens: int | None = None,
    cache_gb: float | None = None,
    workspace: Workspace | None = None,
    on_finish: OnFinish | None = None,
    on_step: OnStep | None = None,
    on_token: OnToken | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> tuple[list[list[Completion]], Stats]:
    """The completions of every request, in the order of `requests` and their keys, and statistics of the call.

    Raises UserError where `cache_gb`, or the free memory, cannot hold the longest single sequence.

    Args:
        model: a transformers causal language model in eval mode whose attention is `ATTENTION`, without hooks that
            communicate: nothing in here waits for another rank.
        max_slots: most completions decoded at the same time.
        prefill_tokens: prompt tokens of one prefill forward; a longer prompt takes several. Default: `PREFILL_TOKENS`.
        cache_gb: GiB of keys and values. Default: a fraction of the free memory. When too small for `max_slots`
            sequences, fewer are decoded at a time, or some are put back and decoded again later.
        workspace: keeps the memory for further calls with the same model; `cache_gb` is that of the first call.
            Default: all memory is given back.
        on_finish: called as soon as a completion is finished.
        on_step: called before every decode step; what it raises ends the call.
        on_token: called with every token as soon as it is known.
        decode: tokens to text; without it texts are empty. Required for `Sampling.stop_strings`.
    """
    if not requests:
        return [], Stats()
    sequences = sequences_of(requests, sampling)
    longest = sorted((len(s.tokens) + s.limit for group in sequences for s in group), reverse=True)
    slots, device = min(max_slots, len(longest)), next(model.parameters()).device
    new_cache, capture = partial(cache_for, _prepared(model), PAGE[device.type], cache_gb, device), capture_on(device)
    if workspace is not None and capture is not None:
        decoder = workspace.decoder(model, sampling, longest[0], new_cache, capture)
    else:
        cache = new_cache(longest, slots)
        decoder = Decoder(model, cache, sampling, slots, cache.pages_for(longest[0]), capture)
    groups = [Group(list(group[0].tokens), deque(group)) for group in sequences]
    loop = _Loop(
        model,
        Scheduler(decoder.cache, groups, min(slots, decoder.slots)),
        decoder,
        prefill_tokens or PREFILL_TOKENS[device.type],
        partial(Sequence.add, sampling=sampling, decode=decode, on_finish=on_finish, on_token=on_token),
    )
    stats = loop.run(on_step)
    return [[s.completion for s in group if s.completion] for group in sequences], stats
