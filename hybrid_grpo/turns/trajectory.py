"""A completion under way: the trajectory of its turns so far, and the partners that answer turns."""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from hybrid_grpo.data.batch import Numbers, Rollout
from hybrid_grpo.data.completion import Called, Message, Prompt
from hybrid_grpo.data.episodes import Observation
from hybrid_grpo.data.picture import Picture
from hybrid_grpo.turns.calls import Turn

T = TypeVar("T")
Finish = Literal["stop", "length"]
"""How a completion ends: by itself, or cut at a limit."""


@dataclass(eq=False)
class Trajectory:
    """The turns of a completion under way, and the answers to them."""

    key: int
    """Key of the completion's random stream, by which the decoder names it."""
    prompt: Prompt | None = None
    """The prompt that is completed; None if the request gave none."""
    messages: list[Message] = field(default_factory=list)
    """The turns that were answered, and the answers that the model has read."""
    turns: int = 0
    """Number of turns that were answered, or are being answered."""
    sampled: int = 0
    """Number of tokens in all turns that have ended."""
    observed: int = 0
    """Number of observation tokens: the tokens of all answers that the model has read."""
    last: int = -1
    """The token that ended the last turn."""
    is_last: bool = False
    """Whether no further turn may follow. The model then does not read the answer to the last turn."""
    pictures: list[Picture] = field(default_factory=list)
    """The pictures in these messages, in order."""
    calls: list[Called] = field(default_factory=list)
    """Calls that have ended, in any order; see `Completion.calls`."""


@dataclass(frozen=True)
class Answer:
    """The answer to a turn of the model."""

    messages: list[Message] = field(default_factory=list)
    """What the model reads before its next turn. If there are no messages, the completion ends."""
    finish: Finish | None = None
    """How the completion ends, if the partner has already ended it with this turn; otherwise None."""


class Arrivals(Generic[T]):
    """What other threads hand over to the decoder, in the order of arrival. Counts the seconds that it waits for it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._waited_s = 0.0
        self.put = self._queue.put

    def next(self, patience_s: float) -> T | None:
        """Return what arrived first, after waiting for it up to `patience_s` seconds; None if there is nothing."""
        start_s = time.perf_counter()
        try:
            return self._queue.get(patience_s > 0, patience_s)
        except queue.Empty:
            return None
        finally:
            self._waited_s += time.perf_counter() - start_s if patience_s else 0.0

    def waited_s(self) -> float:
        """Return the seconds that the decoder has waited since the previous call."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s


class Seconds:
    """Collects how many seconds calls take, until `numbers` reads them; calls may end on any thread."""

    def __init__(self) -> None:
        self._ended: list[tuple[str, float]] = []

    def add(self, name: str, seconds: float) -> None:
        """Add the seconds that a call of this name took."""
        self._ended.append((name, seconds))

    def numbers(self, names: Sequence[str] = ()) -> Numbers:
        """Return the metric `<name>/seconds`, the mean per call, for each of these names. Starts counting anew."""
        ended, self._ended = self._ended, []
        took = {name: [seconds for of, seconds in ended if of == name] for name in names}
        return {f"{name}/seconds": (sum(of) / max(len(of), 1), len(of)) for name, of in took.items()}


class Partner(Protocol):
    """Answers turns of the model. The first of a run's partners that takes a turn answers it."""

    setting: str
    """The setting that names the partner, for messages."""
    reads_last: bool
    """Whether the partner also receives the last turn allowed; otherwise that turn ends the completion unanswered."""
    shows: bool
    """Whether answers may have pictures."""
    seconds: Seconds
    """Seconds that the partner's answers took."""

    def example(self, content: str | Observation) -> Message:
        """Return a message like those in its answers, with this content, to test whether a chat template accepts it."""

    def takes(self, trajectory: Trajectory, turn: Turn) -> bool:
        """Whether the partner answers a turn."""

    def answer(self, trajectory: Trajectory, turn: Turn, done: Callable[[Answer], None]) -> None:
        """Begin to answer a turn that it takes. `done` is called once with the answer, on any thread."""

    def numbers(self, rollout: Rollout) -> Numbers:
        """Return metrics of the completions of a rollout, and of the seconds that answers took since the previous call.
        Counts include completions that a journal kept from before a crash."""
