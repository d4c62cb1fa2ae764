"""A prompt, and a completion of it. data/batch.py has the records that hold many."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

from hybrid_grpo.data.episodes import Episode, Opening
from hybrid_grpo.model.sidecars import Sidecar, TokenRow

if TYPE_CHECKING:
    from hybrid_grpo.data.picture import Picture

Message = dict[str, Any]
"""One chat message: `{"role": ..., "content": ...}`."""


def whole_characters(text: str) -> str:
    """Return the text of tokens without a last character of which only some tokens are there, as where a completion was
    cut."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


@dataclass(frozen=True)
class Prompt:
    """One row of the data set, ready to be completed."""

    id: int
    """Row number in its source. It identifies the prompt in logs, and seeds the random streams of its completions."""
    text: str | list[Message]
    """The prompt as reward functions receive it: as in the data set, plus any system message."""
    token_ids: list[int]
    """The prompt as the model reads it."""
    columns: dict[str, Any]
    """All other columns of the row, for the reward functions."""
    epoch: int = 0
    """Pass over the data in which the prompt was drawn. It distinguishes two draws of one row in the same step."""
    source: str = ""
    """Name of the prompt's source in `data.mixture`; empty without a mixture."""
    opening: Opening | None = None
    """How the prompt's environment begins; None without `rollout.environment`."""
    pictures: tuple[Picture, ...] = ()
    """The pictures that it shows, in order; `token_ids` has their visual tokens."""
    first_step: int = 0
    """Step in which its completions were begun, if that is an earlier one (`rollout.carry`), else 0."""


ObservationTokens = tuple[int, list[int]]
"""Tokens that were inserted between two turns rather than sampled: the number of sampled tokens before them, and the
tokens themselves."""


Called = tuple[str, bool]
"""A call, as its name in metrics (`tool/<name>` or `user`) and whether it failed."""


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt, sampled by the policy or written by someone else. It has one turn, or several turns
    with answers from tools or a user between them. Only sampled tokens count: T, lengths, log-probabilities and
    everything computed from them exclude the observations, which the model only reads."""

    token_ids: list[int]
    """Sampled tokens of all turns, including the end-of-sequence or stop token if there was one."""
    logp: list[float]
    """Log-probability of each token at the sampling temperature, recorded while sampling (`rollout.logprobs`). Empty if
    another writer wrote the completion and the policy does not learn from it."""
    finish: Literal["stop", "length", "open"]
    """`stop`: the completion ended by itself; `length`: it was cut at the limit; `open`: it has not ended yet, and will
    be carried into the next step."""
    text: str = ""
    """The last turn as text, without special tokens."""
    observations: tuple[ObservationTokens, ...] = ()
    """The tokens inserted between the turns, in order, those of pictures below 0; empty if there is one turn."""
    messages: tuple[Message, ...] = ()
    """The turns and the answers to them, as the messages that follow the prompt; empty without tools."""
    writer: str = ""
    """Who wrote the completion; empty for the policy."""
    learned: bool = True
    """Whether the completion is part of the loss; if not, it only takes part in the comparison within its group."""
    pictures: tuple[Picture, ...] = ()
    """The pictures in `observations`, in order."""
    episode: Episode | None = None
    """The outcome of the completion's environment; None without one."""
    calls: tuple[Called, ...] = ()
    """The completion's tool calls, and a call `user` for each turn that the user answered, sorted."""
    sidecars: tuple[Sidecar, ...] = ()
    """What the sampler recorded beside the tokens."""
    carried: tuple[int, ...] = ()
    """The number of its tokens each time that it was carried into another step, ascending: policies before that step
    sampled them."""
    histories: tuple[int, ...] = ()
    """Indices of the observations with which the model began to read anew, ascending, the first of them 0: what stands
    before such an observation, the prompt included, it no longer reads. Empty unless an agent wrote what it reads."""

    @property
    def turns(self) -> int:
        """Number of turns of the model."""
        return len(self.observations) + (not self.histories)

    @property
    def old_tokens(self) -> int:
        """Number of tokens that were sampled in earlier steps."""
        return self.carried[-1] if self.carried else 0

    @property
    def new_tokens(self) -> int:
        """Number of tokens that were sampled in the present step."""
        return len(self.token_ids) - self.old_tokens

    @property
    def policies(self) -> int:
        """Number of versions of the policy that sampled tokens of it."""
        ends = [*self.carried, len(self.token_ids)]
        return sum(end > begin for begin, end in zip([0, *ends], ends, strict=False))

    def cut(self, tokens: int) -> Completion:
        """The completion as it was when it had this many tokens: open, unless it had already ended."""
        if len(self.token_ids) < tokens or (len(self.token_ids) == tokens and self.finish != "open"):
            return self
        ids, logp = self.token_ids[:tokens], self.logp[:tokens]
        sidecars = tuple(each.part(slice(tokens), slice(tokens - 1)) for each in self.sidecars) if tokens else ()
        return replace(self, token_ids=ids, logp=logp, finish="open", text="", sidecars=sidecars)

    def carry(self) -> Completion:
        """The completion at the end of a step after which it is carried on."""
        return replace(self, carried=(*self.carried, len(self.token_ids)))

    def token_rows(self, index: int, prompt_ids: list[int]) -> list[TokenRow]:
        """The completion as a model reads it in training, after its prompt, or each of its histories by itself; targets
        are the sampled tokens, each once."""
        if not self.histories:
            return [TokenRow(index, prompt_ids, self.read_ids, self.sampled_places, self.sidecars)]
        rows, read = list[TokenRow](), 0
        for begin, end in pairwise([*self.histories, len(self.observations)]):
            (first, history), *rest = self.observations[begin:end]
            last = self.observations[end][0] if end < len(self.observations) else len(self.token_ids)
            between = tuple((place - first, ids) for place, ids in rest)
            part = Completion(self.token_ids[first:last], [], "stop", observations=between)
            ids, after = part.read_ids, read + len(history) + len(part.read_ids) - 1
            sidecars = tuple(each.part(slice(first, last), slice(read, after)) for each in self.sidecars)
            rows.append(TokenRow(index, history, ids, part.sampled_places, sidecars, first))
            read = after
        return rows

    @property
    def read_ids(self) -> list[int]:
        """All tokens after the prompt as the model reads them, including the observations."""
        ids: list[int] = []
        begin = 0
        for end, inserted in self.observations:
            ids += self.token_ids[begin:end] + inserted
            begin = end
        return ids + self.token_ids[begin:]

    @property
    def sampled_places(self) -> Sequence[int]:
        """The index in `read_ids` of each sampled token."""
        if not self.observations:
            return range(len(self.token_ids))
        ends = [end for end, _ in self.observations]
        shifts = list(accumulate((len(ids) for _, ids in self.observations), initial=0))
        return [place + shifts[bisect_right(ends, place)] for place in range(len(self.token_ids))]
