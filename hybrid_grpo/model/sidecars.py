"""Sidecars: records that travel beside the tokens of a completion, from the sampler to the training forward.

What samples, stores, cuts and packs completions holds sidecars in a tuple and does not know their kinds. `KINDS` in
data/completion_records.py lists those that the sampler makes; `Reading` makes of them what a training forward takes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol, Self, TypeVar

import numpy as np

T = TypeVar("T")


class Sidecar(Protocol):
    """One record of a completion, with entries for its tokens. A kind is built from the arrays that it returns."""

    name: ClassVar[str]
    """Names the kind in the journal and in checkpoints."""

    def part(self, sampled: slice, read: slice) -> Self:
        """Return the record of some tokens: indices among those sampled, and among those read after the prompt."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the record of what is sampled and read in all parts, in order, after the prompt of the first."""

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the record as arrays."""


def find(sidecars: Iterable[object], kind: type[T]) -> T | None:
    """Return the sidecar of this kind, or None."""
    return next((each for each in sidecars if isinstance(each, kind)), None)


def without(sidecars: Iterable[Sidecar], kind: type[Sidecar]) -> tuple[Sidecar, ...]:
    """Return the sidecars that are not of this kind."""
    return tuple(each for each in sidecars if not isinstance(each, kind))


@dataclass(frozen=True)
class TokenRow:
    """A prompt and a completion as a model reads them in training."""

    index: int
    """Index of the row in its rollout."""
    prompt: list[int]
    completion: list[int]
    """All tokens after the prompt, at least one."""
    targets: Sequence[int]
    """Indices of the completion tokens that are targets, ascending; the last is the completion's last token."""
    sidecars: tuple[Sidecar, ...] = ()
    first: int = 0
    """Index of the first target among all sampled tokens of the rollout's row, which several of these may read."""

    @classmethod
    def of(cls, prompt_ids: Sequence[list[int]], completion_ids: Sequence[list[int]]) -> list[Self]:
        """Return rows without sidecars, all of whose completion tokens are targets."""
        pairs = enumerate(zip(prompt_ids, completion_ids, strict=True))
        return [cls(index, prompt, ids, range(len(ids))) for index, (prompt, ids) in pairs]

    @cached_property
    def ids(self) -> list[int]:
        """The tokens to compute: all but the last of the row, which predicts nothing."""
        return [*self.prompt, *self.completion[:-1]]

    @property
    def tokens(self) -> int:
        """Number of tokens to compute."""
        return len(self.prompt) + len(self.completion) - 1


class Piece(NamedTuple):
    """Tokens of a row, which are computed once for all rows that have in common what ends with them."""

    row: TokenRow
    begin: int
    end: int
    parent: int = -1
    """Number of the piece that it continues; -1 for none."""

    @property
    def tokens(self) -> int:
        return self.end - self.begin
