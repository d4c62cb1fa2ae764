"""The requests of a call of `generate`, and the sequences that its loop decodes for them."""

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.generation.sampler import Sampling
from hybrid_grpo.generation.scheduler import Group
from hybrid_grpo.generation.sequence import Sequence
from hybrid_grpo.model.reading import Reading


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


def groups_of(sequences: list[Sequence]) -> list[Group]:
    """Return the groups of a request: what an earlier call began is read by itself, the rest shares the prompt."""
    resumed = [Group(list(s.tokens), deque([s]), experts=s.experts) for s in sequences if s.resumed_from]
    new = deque(s for s in sequences if not s.resumed_from)
    return [*resumed, *([Group(list(new[0].tokens), new)] if new else [])]


def lengths_of(groups: list[list[Sequence]], *, several_turns: bool) -> list[int]:
    """Return the maximum number of tokens of each sequence, in descending order."""
    every = (s for group in groups for s in group)
    return sorted(
        (s.max_total_tokens if several_turns else min(s.max_total_tokens, s.prompt + s.limit) for s in every),
        reverse=True,
    )
