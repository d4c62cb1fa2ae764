"""Episodes under way, and their histories: sequences of the decoder, each with the chat that it has become."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import mean
from typing import Any

import numpy as np

from hybrid_grpo.data.completion import Completion, Message, ObservationTokens, Prompt
from hybrid_grpo.data.episodes import Episode, Part
from hybrid_grpo.data.packing import begin_alike
from hybrid_grpo.data.picture import Picture
from hybrid_grpo.data.pictures import bared, placed
from hybrid_grpo.distributed.workers.calls import Failure, Reply, failed
from hybrid_grpo.generation.sequence import Finish, Sequence
from hybrid_grpo.turns.agents.endpoint import Answer
from hybrid_grpo.turns.agents.protocol import Ask
from hybrid_grpo.turns.template import assistant_message

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
    pictures: list[Picture] = field(default_factory=list)
    """Those that it has read, in order."""
    ask: Ask | None = None
    """The request whose turn is being sampled; None between turns."""
    answer: Answer | None = None
    """Answers this request."""
    turn: int = 0
    """Number of the last turn within its episode, from 0."""
    said: list[tuple[str, str, int]] = field(default_factory=list)
    """The replies that it got: the name of each, the role that asked, the number of sampled tokens up to its end."""
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
    completions = [history.completion for history in play.histories if history.completion is not None]
    for completion in completions:
        starts += [len(observations)] if completion.observations else []
        observations += [(len(ids) + place, given) for place, given in completion.observations]
        ids += completion.token_ids
        logp += completion.logp
    value = outcome.values[0]
    parts = _parts(play.histories, value) if isinstance(value, dict) else ()
    total = value if not isinstance(value, dict) else mean(value.values()) if value else None
    *others, last = sorted(play.histories, key=lambda history: history.turn)
    words, before = _words(last), placed(play.prompt.text, len(play.prompt.pictures))
    *earlier, chat = ([bared(message)[0] for message in of.chat] or [_words(of)] for of in (*others, last))
    chat = chat[len(before) :] if begins(chat, before) else chat
    failure = outcome.failures[0]
    return Completion(
        ids, logp, "length" if play.is_cut else "stop", words["content"], tuple(observations), tuple(chat),
        pictures=tuple(picture for history in play.histories for picture in history.pictures), learned=bool(starts),
        episode=Episode(
            reward, total=total, parts=parts, chats=tuple(map(tuple, earlier)),
            failure=failure.message if failure else None,
        ),
        histories=tuple(starts),
        sidecars=tuple(type(parts[0]).joined(parts) for parts in zip(*(c.sidecars for c in completions), strict=True)),
    )  # fmt: skip


def _words(history: History) -> Message:
    """What was sampled last in a history that its agent wrote in tokens."""
    return assistant_message(history.completion.text if history.completion else "", [])


def checked(play: Play, reply: Reply) -> Reply:
    """Return what an agent returned, failed if it rewards what is neither a role nor a reply of the episode."""
    names = {name for history in play.histories for *of, _ in history.said for name in of}
    value = reply.values[0]
    unknown = [name for name in value if name not in names] if isinstance(value, dict) else []
    if not unknown:
        return reply
    why = f"returned a reward for {unknown[0]!r:.80}, which is neither a model that it named nor the id of a reply"
    return failed(Failure("invalid", why), 1)


def _parts(histories: list[History], rewards: dict[str, float]) -> tuple[Part, ...]:
    """Return what each reward is for. That of a role is for its turns. That of a reply is for the reply and for what
    was sampled of all that it had read."""
    completions = [history.completion for history in histories if history.completion is not None]
    read = [(of.read_ids, np.array(of.sampled_places, dtype=np.int64)) for of in completions]
    firsts = [0, *accumulate(len(places) for _, places in read)]
    roles = {name: name for name in rewards}
    masks = {name: np.zeros(firsts[-1], bool) for name in rewards}
    for number, history in enumerate(histories):
        ids, places = read[number]
        begin, first = 0, firsts[number]
        for id, role, end in history.said:
            if role in rewards:
                masks[role][first + begin : first + end] = True
            if id in rewards:
                roles[id] = role
                path = ids[: places[end - 1] + 1]
                # What another history sampled behind this beginning was not read, even where it is the same.
                known = [min(begin_alike(path, other), int(places[0])) for other, _ in read]
                known[number] = len(path)
                masks[id] = np.concatenate([p < most for (_, p), most in zip(read, known, strict=True)])
            begin = end
    count = np.maximum(sum(masks.values(), start=np.zeros(1, np.int64)), 1)
    return tuple(Part(roles[name], rewards[name], _spans(mask / count)) for name, mask in masks.items())


def _spans(weights: np.ndarray) -> tuple[tuple[int, int, float], ...]:
    """Return where weights are above 0: begins, ends and weights."""
    edges = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), len(weights)]
    return tuple((begin, end, float(weights[begin])) for begin, end in pairwise(edges) if weights[begin])


def begins(whole: list[Any], part: list[Any]) -> bool:
    """Whether a list begins with another, and continues."""
    return len(part) < len(whole) and whole[: len(part)] == part
