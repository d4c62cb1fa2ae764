"""A completion under way as a conversation, and what those who answer the model's turns have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hybrid_grpo.data.batch import Message, Numbers, Prompt
from hybrid_grpo.turns.calls import Turn

Finish = Literal["stop", "length"]
"""How a completion ends: by itself, or cut at a limit."""


@dataclass(eq=False)
class Conversation:
    """A completion under way."""

    key: int
    """Key of the completion's random stream, by which the decoder names it."""
    prompt: Prompt | None = None
    """What is completed; None where the request did not say."""
    messages: list[Message] = field(default_factory=list)
    """The turns that were answered, and the answers that the model has read."""
    turns: int = 0
    """Turns that were answered, or are being answered."""
    sampled: int = 0
    """Tokens of all turns that have ended."""
    given: int = 0
    """Tokens of all answers that the model has read."""
    last: int = -1
    """The token that ended the turn."""
    is_last: bool = False
    """No turn may follow the one that has ended: what answers it is not read."""
    is_full: bool = False
    """Only a limit of tokens lets no turn follow, and not the limit of turns."""


@dataclass(frozen=True)
class Answer:
    """What is said to a turn of the model."""

    messages: list[Message] = field(default_factory=list)
    """What the model reads before its next turn; none end the conversation."""
    finish: Finish | None = None
    """How the completion ends with the turn; None where it goes on."""


class Partner(Protocol):
    """Who answers turns of the model. The first of a run's partners that takes a turn answers it."""

    setting: str
    """The setting that names it, for messages."""
    reads_last: bool
    """Whether it is to hear of turns behind which there is no other; else these end the completion unheard."""

    def example(self, content: str) -> Message:
        """A message such as it gives, with this content: shows whether a chat template has a place for it."""

    def takes(self, conversation: Conversation, turn: Turn) -> bool:
        """Whether a turn is for it."""

    def answer(self, conversation: Conversation, turn: Turn, done: Callable[[Answer], None]) -> None:
        """Begin to answer a turn that it takes. `done` is told the answer once, in whatever thread."""

    def numbers(self) -> Numbers:
        """What happened since the last call of this, by metric."""
