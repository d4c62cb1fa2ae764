"""The requests and callbacks of a call of `generate`, and one completion while it is sampled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any, Literal, Protocol

import numpy as np

from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.completion import Completion, ObservationTokens, whole_characters
from hybrid_grpo.generation.sampler import Sampling
from hybrid_grpo.model.reading import TEXT, Reading
from hybrid_grpo.model.routing import Routing
from hybrid_grpo.model.sidecars import Sidecar, find
from hybrid_grpo.model.support import SamplingMask

OnFinish = Callable[[int, int, Completion], None]
"""Called with the index of the request, the index of the sample within the request, and the completion."""
OnStep = Callable[[], None]
"""Called before every decode step."""
ShouldStop = Callable[[Callable[[], int]], bool]
"""Called before every decode step, with a function that returns the least number of tokens that this call has sampled
for a completion that has not ended. Returns whether to leave such completions open."""
Finish = Literal["stop", "length"]
"""How a completion ends: `stop` by itself, `length` because it was cut at a limit."""


@dataclass(frozen=True)
class Request:
    """A prompt, and the completions to sample."""

    prompt_ids: list[int]
    """At least one token."""
    keys: list[int]
    """Key of each completion, which names it, and of its random stream; see `stream_key`."""
    limits: list[int] | None = None
    """Maximum number of sampled tokens for each completion. Default: `Sampling.max_tokens` for all."""
    max_total_tokens: int | None = None
    """Maximum number of tokens of prompt, sampled tokens and answers between turns together. Required with `turns`."""
    prompt: Prompt | None = None
    """The prompt that `prompt_ids` encode, which `Turns` needs."""
    resumed_from: list[Completion | None] | None = None
    """For each completion, the partial completion of an earlier call to resume, or None."""


class Turns(Protocol):
    """What happens between the turns of completions. A completion is named by the key of its random stream."""

    @property
    def begins_sequences(self) -> bool:
        """Whether completions are made of sequences that `answers` begins, and that `completions` joins."""

    @property
    def is_open(self) -> bool:
        """Whether `answers` may still begin sequences."""

    def begin(self, requests: Any) -> None:
        """Called when the completions of a list of `Request` begin; completions still under way are abandoned."""

    def ended(self, key: int, turn_ids: list[int], room: int) -> Finish | None:
        """Called when a turn with these tokens has ended by itself, and `room` more tokens may be sampled. Returns how
        the completion ends, or None if it waits for an answer."""

    def cut(self, key: int) -> Finish | None:
        """Called when a turn was cut at a token limit; returns the same as `ended`."""

    def answers(self, patience_s: float) -> Iterable[tuple[int | Sequence, list[int] | Finish]]:
        """Return the answers since the last call: for each, the key, or a new sequence without tokens, and the answer's
        tokens or how the completion ends. Waits up to `patience_s` seconds for the first."""

    def finished(self, key: int, completion: Completion) -> Completion | None:
        """Called when a completion has ended; returns it with its messages, or None if it is a part of another."""

    def completions(self) -> list[list[Completion]]:
        """Return the completions of all requests, if `begins_sequences`."""


@dataclass(frozen=True)
class Callbacks:
    """What `generate` calls besides the model; by default nothing is called."""

    on_finish: OnFinish | None = None
    """Called as soon as a completion is finished."""
    on_step: OnStep | None = None
    """Called before every decode step; an exception from it ends the call."""
    on_token: Callable[[int, int, int], None] | None = None
    """Called with every token as soon as it is known, after the indices of the request and of its sample."""
    decode: Callable[[list[int]], str] | None = None
    """Turns tokens into text. Without it texts are empty. Required for `Sampling.stop_strings`."""
    turns: Turns | None = None
    """Answers the turns of a completion. Without it a completion is one turn."""
    should_stop: ShouldStop | None = None
    """Says when to leave the rest of the completions open; without it all end. Not with `turns`."""
    reading: Reading = TEXT
    """How the model reads pictures in prompts and answers."""
    recorded: Callable[[Sequence], tuple[Sidecar, ...]] = lambda sequence: sequence.masks
    """Returns what was recorded for a sequence whose turn has ended; the loop's own."""


@dataclass
class Stats:
    """Statistics of a call of `generate`."""

    steps: int = 0
    """Forward passes of the decode loop."""
    rows: int = 0
    """Total rows of these passes: one for each sampled token, and for each that came after the end of a turn."""
    context: int = 0
    """Cache entries that these rows attended to."""
    prefills: int = 0
    """Number of prompts read; a preempted sequence that is read again is counted again."""
    answers: int = 0
    """Number of answers between turns that were added to an existing cache."""
    preempted: int = 0
    """Number of sequences that lost their pages while they were being decoded or waiting."""
    peak_cache_bytes: int = 0
    captures: int = 0
    """Number of forwards captured as CUDA graphs."""


new_text = count().__next__
"""Returns a number that no other text has."""


@dataclass(eq=False)
class Sequence:
    """One completion while it is sampled."""

    request: int
    sample: int
    key: int
    """Names the completion, and keys its random stream if no other is given."""
    tokens: list[int]
    """The prompt and the tokens so far. The last one is not in the cache yet: the next step feeds it."""
    prompt: int
    """Number of prompt tokens in `tokens`."""
    limit: int
    """Maximum number of tokens to sample."""
    logp: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    known_pages: int = 0
    """Number of `pages` that the device knows while the sequence is being decoded."""
    position: int = 0
    """Cache entry that the next step writes; ahead of `tokens` by the steps whose outcome has not been read yet."""
    completion: Completion | None = None
    max_total_tokens: int = sys.maxsize
    """Maximum number of tokens of the prompt, the sampled tokens and the answers between turns together."""
    turn_limit: int = sys.maxsize
    """Maximum number of tokens to sample in one turn."""
    sampled: list[int] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)
    """The support of each sampled token; empty if it is not recorded."""
    observations: list[ObservationTokens] = field(default_factory=list)
    begin: int = field(init=False)
    """Index in `tokens` at which the turn begins."""
    turn_end: int = field(init=False)
    """Length of `tokens` at which a limit ends the turn."""
    waits: bool = False
    """Whether the turn has ended and has not been answered yet."""
    state: int = -1
    """Row of the cache's states that the sequence begins or continues from when it gets a slot."""
    stream: int = 0
    """Key of the random stream of the turn."""
    stream_begin: int = 0
    """Number of tokens that were sampled before the stream began."""
    known: int = 0
    """Number of its first tokens that were in the pages of others when it got a slot."""
    recorded: np.ndarray | None = None
    """What the cache recorded for its tokens when it lost its pages, [tokens, ...]."""
    position_offset: int = 0
    """How far encoded positions after what was read are ahead of those in the cache."""
    text: int = -1
    """Number of its text before the last token, which sequences share while their tokens are the same."""
    reported: tuple[Sidecar, ...] | None = None
    """What was recorded up to the end of the turn; None unless someone wants it, who sets it to ()."""
    resumed_from: Completion | None = None
    """The completion with the tokens that an earlier call has sampled; `tokens` is the prompt alone at first."""

    def __post_init__(self) -> None:
        self.stream = self.stream or self.key
        self._begin_turn()
        if self.resumed_from is not None:
            self.tokens += self.resumed_from.token_ids
            self.sampled += self.resumed_from.token_ids
            self.logp += self.resumed_from.logp
            if (mask := find(self.resumed_from.sidecars, SamplingMask)) is not None:
                self.kept += mask.lists()
            if (routing := find(self.resumed_from.sidecars, Routing)) is not None:
                self.recorded = np.concatenate(routing.arrays())

    def _begin_turn(self) -> None:
        self.begin = len(self.tokens)
        self.turn_end = self.begin + min(self.room, self.turn_limit)

    @property
    def turn(self) -> int:
        return len(self.observations)

    @property
    def masks(self) -> tuple[Sidecar, ...]:
        return (SamplingMask.of(self.kept),) if self.kept else ()

    @property
    def new_tokens(self) -> int:
        """Number of tokens that this call has sampled."""
        return len(self.sampled) - (len(self.resumed_from.token_ids) if self.resumed_from else 0)

    @property
    def is_open(self) -> bool:
        """Whether the turn continues."""
        return self.completion is None and not self.waits

    @property
    def room(self) -> int:
        """Number of tokens that may still be sampled."""
        return min(self.limit - len(self.logp), self.max_total_tokens - len(self.tokens))

    def add(self, token: int, logp: float, kept: np.ndarray | None, sampling: Sampling, callbacks: Callbacks) -> None:
        """Append a sampled token; `kept` is its support, if recorded. If the token ends the completion, call `end`; if
        it ends only the turn, set `waits`."""
        self.tokens.append(token)
        self.sampled.append(token)
        self.logp.append(logp)
        if kept is not None:
            self.kept.append(kept)
        if callbacks.on_token is not None:
            callbacks.on_token(self.request, self.sample, token)
        stopped = token in sampling.stop_ids
        if sampling.stop_strings and not stopped:
            turn = self.tokens[self.begin :]
            stopped = text_ends(turn, sampling, callbacks.decode, len(self.sampled) - len(turn))
        if not stopped and len(self.tokens) < self.turn_end:
            return
        finish: Finish | None = "stop" if stopped else "length"
        if (turns := callbacks.turns) is not None:
            self.reported = None if self.reported is None else callbacks.recorded(self)
            turn = self.tokens[self.begin :]
            finish = turns.ended(self.key, turn, self.room) if stopped else turns.cut(self.key)
            self.waits = finish is None
            self.position = len(self.tokens) - 1
        if finish is not None:
            self.end(finish, callbacks)

    def answer(self, observation: list[int] | Finish) -> Finish | None:
        """Begin the next turn after the answer's tokens, and return None. If the answer ends the completion or leaves
        no room, return how it ends instead."""
        if isinstance(observation, str):
            return observation
        if len(self.tokens) + len(observation) >= self.max_total_tokens:
            return "length"
        self.observations.append((len(self.sampled), observation))
        self.tokens += observation
        self._begin_turn()
        self.waits = False
        return None

    def end(self, finish: Finish | Literal["open"], callbacks: Callbacks) -> None:
        """Set `completion`, and pass it to the callbacks unless it is left open."""
        text = callbacks.decode(self.tokens[self.begin :]) if callbacks.decode else ""
        text = whole_characters(text) if finish == "length" else text
        self.waits = False
        self.completion = Completion(
            token_ids=self.sampled, logp=self.logp, finish=finish, text=text, observations=tuple(self.observations),
            sidecars=callbacks.recorded(self), carried=self.resumed_from.carried if self.resumed_from else (),
        )  # fmt: skip
        whole: Completion | None = self.completion
        if callbacks.turns is not None:
            whole = callbacks.turns.finished(self.key, self.completion)
            self.completion = whole or self.completion
        if callbacks.on_finish is not None and finish != "open" and whole is not None:
            callbacks.on_finish(self.request, self.sample, whole)


def sequences_of(requests: Iterable[Request], sampling: Sampling, reading: Reading) -> list[list[Sequence]]:
    """Create the sequences of each request, with nothing sampled in this call yet."""
    groups = []
    for index, request in enumerate(requests):
        assert request.prompt_ids and request.keys, "a prompt has tokens, a request keys"
        prompt, limits = request.prompt_ids, request.limits or [sampling.max_tokens] * len(request.keys)
        total, turn = request.max_total_tokens or sys.maxsize, sampling.max_turn_tokens
        assert len(prompt) < total, "there is room for a token after the prompt"
        offset = reading.offset(prompt)
        new = partial(Sequence, prompt=len(prompt), max_total_tokens=total, turn_limit=turn, position_offset=offset)
        none = [None] * len(request.keys)
        each = zip(request.keys, limits, request.resumed_from or none, strict=True)
        groups.append(
            [new(index, k, key, list(prompt), limit=limit, resumed_from=c) for k, (key, limit, c) in enumerate(each)]
        )
    return groups


def lengths_of(groups: list[list[Sequence]], *, several_turns: bool) -> list[int]:
    """Return the maximum number of tokens of each sequence, in descending order."""
    every = (s for group in groups for s in group)
    return sorted(
        (s.max_total_tokens if several_turns else min(s.max_total_tokens, s.prompt + s.limit) for s in every),
        reverse=True,
    )


@lru_cache(maxsize=1 << 17)
def _may_end(token: int, lasts: str, decode: Callable[[list[int]], str]) -> bool:
    """Whether the text of a token may contain one of `lasts`, the last characters of stop strings. Only this token is
    decoded, since decoding every row at every step would take longer than the rest of the step.

    Decoded alone, a token may lack spaces that it has after other tokens, and an incomplete character becomes U+FFFD.
    """
    text = decode([token])
    return "\ufffd" in text or any(last in text or last.isspace() for last in lasts)


def text_ends(
    token_ids: list[int], sampling: Sampling, decode: Callable[[list[int]], str] | None, earlier: int = 0
) -> bool:
    """Whether the last token of a turn completes a stop string.

    Only the end of the text is decoded: a character takes at most four tokens, one for each of its UTF-8 bytes.
    `token_ids` are the tokens of the turn so far; previous turns had `earlier` tokens. Stop strings require `decode`.
    """
    if not sampling.stop_strings or earlier + len(token_ids) < sampling.min_tokens:
        return False
    assert decode is not None, "stop strings need `decode`"
    if not _may_end(token_ids[-1], "".join(string[-1] for string in sampling.stop_strings), decode):
        return False
    tail = token_ids[-4 - 4 * max(map(len, sampling.stop_strings)) :]
    text = decode(tail)
    # A string that was ignored before `min_tokens` is still in the text, and must not end it later either.
    before = decode(tail[:-1]) if sampling.min_tokens else ""
    return any(text.rfind(string) > before.rfind(string) for string in sampling.stop_strings)
