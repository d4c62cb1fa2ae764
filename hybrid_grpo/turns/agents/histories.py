"""Episodes under way, and their histories: sequences of the decoder, each with the chat that it has become."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hybrid_grpo.data.completion import Completion, Message, ObservationTokens, Prompt
from hybrid_grpo.data.episodes import Episode
from hybrid_grpo.distributed.workers.calls import Reply
from hybrid_grpo.generation.sequence import Finish, Sequence
from hybrid_grpo.turns.agents.endpoint import Answer
from hybrid_grpo.turns.agents.protocol import Ask
from hybrid_grpo.turns.template import assistant_message, user_message

Ready = list[tuple[int | Sequence, list[int] | Finish]]
"""What `Turns.answers` returns."""


@dataclass(eq=False)
class History:
    """A sequence of an episode, and the chat that it has become."""

    play: Play
    sequence: Sequence
    tools: str
    """The tools that the chat began with, as JSON."""
    repeats: int = 0
    """With how many of the tokens of its first turn another history of the episode began, or had become."""
    chat: list[Message] = field(default_factory=list)
    """Empty if the agent writes tokens."""
    ask: Ask | None = None
    """The request whose turn is being sampled; None between turns."""
    answer: Answer | None = None
    """Answers this request."""
    turn: int = 0
    """Number of the last turn within its episode, from 0."""
    completion: Completion | None = None
    """What was sampled, once the history has ended."""


@dataclass(eq=False)
class Play:
    """An episode."""

    request: int
    sample: int
    key: int
    prompt: Prompt
    longest: int
    """Maximum number of tokens of a history."""
    begin_s: float = field(default_factory=time.perf_counter)
    attempt: str = ""
    """Names the process that runs the agent; an episode that was begun again has another."""
    histories: list[History] = field(default_factory=list)
    dropped: list[History] = field(default_factory=list)
    """Histories of earlier attempts, which do not count."""
    turns: int = 0
    asked: Counter[int] = field(default_factory=Counter)
    """How often each request was made, by its key."""
    sampled: int = 0
    """Tokens of all turns that have ended."""
    is_cut: bool = False
    """Whether a turn was refused for a limit of the run."""
    outcome: Reply | None = None
    """What the agent returned; None until it has ended."""
    completion: Completion | None = None
    """All that was sampled, once all histories have ended."""


def stopped(histories: list[History]) -> Ready:
    """End histories between turns; those whose turn is being sampled get one more token."""
    ready: Ready = []
    for history in histories:
        sequence = history.sequence
        if history.completion is not None:
            continue
        if history.ask is None:
            ready.append((sequence.key, "stop"))
        sequence.turn_limit = 1
        sequence.turn_end = min(sequence.turn_end, len(sequence.tokens) + 1)
    return ready


def joined(play: Play, outcome: Reply, reward: str) -> Completion:
    """Return the histories of an episode as one completion."""
    ids, logp = list[int](), list[float]()
    observations, starts = list[ObservationTokens](), list[int]()
    for completion in (history.completion for history in play.histories):
        assert completion is not None
        starts += [len(observations)] if completion.observations else []
        observations += [(len(ids) + place, given) for place, given in completion.observations]
        ids += completion.token_ids
        logp += completion.logp
    last = max(play.histories, key=lambda history: history.turn)
    text, asked = last.completion.text if last.completion else "", play.prompt.text
    before: list[Message] = [user_message(asked)] if isinstance(asked, str) else asked
    chat = last.chat[len(before) :] if begins(last.chat, before) else last.chat
    failure = outcome.failures[0]
    return Completion(
        ids,
        logp,
        "length" if play.is_cut else "stop",
        text,
        tuple(observations),
        tuple(chat) or (assistant_message(text, []),),
        learned=bool(starts),
        episode=Episode(reward, total=outcome.values[0], failure=failure.message if failure else None),
        histories=tuple(starts),
    )


def begins(whole: list[Any], part: list[Any]) -> bool:
    """Whether a list begins with another, and continues."""
    return len(part) < len(whole) and whole[: len(part)] == part
