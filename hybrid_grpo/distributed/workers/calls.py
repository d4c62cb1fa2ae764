"""What a rank and its worker processes exchange: entries to load, calls to them, and replies.

An `Entry` names other people's code. It is sent to the worker processes, loads a `Callee` there, and checks the values
of replies in the rank. This module needs no torch.
"""

import math
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

Inputs = dict[str, list[Any]]
"""Arguments of a call by name, each with one element per row."""
Kind = Literal["raised", "invalid", "timeout", "died"]
"""Kinds of failures: the callee raised, returned an invalid value, took too long, or ended its process."""
LONGEST_TRACEBACK = 20_000
"""Maximum number of characters of a traceback."""


@dataclass(frozen=True)
class Failure:
    """Why a row of a call has no value."""

    kind: Kind
    message: str
    """One line: the rest of a sentence that begins with the name of what was called."""
    traceback: str = ""


@dataclass(frozen=True)
class Call:
    """One call, with any number of rows."""

    inputs: Inputs
    expected: list[Any]
    """One element per row, which is passed to `Entry.checked` together with the row's value."""
    state: dict[str, Any] = field(default_factory=dict)
    """Facts about the run at the time of the call, in JSON types."""

    def rows(self, rows: list[int]) -> Self:
        """Return the same call, restricted to the rows with these indices."""
        inputs = {name: [values[row] for row in rows] for name, values in self.inputs.items()}
        return type(self)(inputs, [self.expected[row] for row in rows], self.state)


@dataclass(frozen=True)
class Reply:
    """The result of one call."""

    values: list[Any]
    """One value per row; None if the row failed, or if the callee returned None."""
    failures: list[Failure | None]
    """One element per row; None if the row did not fail."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Lists by name, one element per row: what the callee wants stored with the values, in JSON types."""
    spent: bool = False
    """Whether the process has run out of memory, so that another process should make the next call."""
    whole: bool = False
    """Whether the call failed as a whole, so that some of its rows may not be at fault."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each time that the callee ran, in seconds by `time.perf_counter` of the rank."""


def failed(failure: Failure, rows: int, *, spent: bool = False) -> Reply:
    """Return the reply to a call that failed as a whole."""
    return Reply([None] * rows, [failure] * rows, spent=spent, whole=rows > 1)


def raised(error: BaseException, message: str, rows: int, hint: str = "") -> Reply:
    """Return the reply to a call that raised `error`, in words `message`; the traceback ends with `hint`."""
    trace = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:] + hint
    return failed(Failure("raised", message, trace), rows, spent=isinstance(error, MemoryError))


def timed_out(timeout_s: float, rows: int) -> Reply:
    return failed(Failure("timeout", f"took longer than its timeout_s, {timeout_s:g}"), rows)


def died(status: int | None, rows: int) -> Reply:
    """Return the reply to a call whose process has ended, with this exit status if it is known."""
    if status is None:
        how = ""
    elif status == -9:
        how = " (killed: by the system for its memory, by itself, or for closing its socket)"
    else:
        how = f" (exit status {status})" if status >= 0 else f" (signal {-status})"
    return failed(Failure("died", f"ended its process{how}"), rows)


@dataclass(frozen=True)
class Interface:
    """How a callee is to be called."""

    required: list[str]
    """Parameters that have no default and are not set by `kwargs`."""
    accepted: list[str] | None
    """Parameters that can be given by name; None if any can (**kwargs)."""
    is_async: bool
    batch_size: int | Literal["group", "all"]
    """Rows per call. `group`: the completions of a prompt. `all`: a rank's rows, if any; all ranks call together."""
    instead: dict[str, str] = field(default_factory=dict)
    """For some required parameters, the name of the input that can replace each of them."""
    settings: list[str] = field(default_factory=list)
    """Parameters that only `kwargs` may set, even if there is an input of the same name."""
    schema: dict[str, Any] = field(default_factory=dict)
    """Anything else that an entry reports about the callee that it has loaded, in JSON types."""

    def accepts(self, name: str) -> bool:
        return name not in self.settings and (self.accepted is None or name in self.accepted)


class Callee(Protocol):
    """The code that an entry has loaded, in the process that calls it."""

    @property
    def interface(self) -> Interface: ...

    def reply(self, call: Call) -> Reply:
        """Carry out a call. Whatever other people's code raises becomes a failure."""

    async def reply_async(self, call: Call) -> Reply:
        """Carry out a call like `reply`, but as a coroutine; only called if the interface is async."""


class Entry(Protocol):
    """Other people's code that worker processes load. An entry is pickled, and its module needs no torch."""

    def load(self, name: str) -> Callee:
        """Load the entry, in a worker process; `name` names it in messages. Raises UserError if that is impossible."""

    def checked(self, value: Any, expected: Any) -> Any:
        """Rebuild a row's value from parsed JSON in a form that is safe to use; called in the rank. Raises ValueError
        or TypeError if the value is not valid."""


def call_inline(ask: Callable[[Call], Reply], call: Call) -> Future[Reply]:
    """Call at once, in this thread and without a time limit; an exception that `ask` raises ends the run."""
    start_s = time.perf_counter()
    reply = ask(call)
    if reply.whole:
        reply = joined([ask(row) for row in single_rows(call)])
    done: Future[Reply] = Future()
    done.set_result(replace(reply, spans=[(start_s, time.perf_counter())]))
    return done


def joined(replies: Sequence[Reply]) -> Reply:
    """Join the replies to successive rows. In `extra`, rows have None under names that their reply does not use."""
    extra = {
        name: [value for reply in replies for value in reply.extra.get(name, [None] * len(reply.values))]
        for name in {name: None for reply in replies for name in reply.extra}
    }
    return Reply(
        [value for reply in replies for value in reply.values],
        [failure for reply in replies for failure in reply.failures], extra,
        spans=[span for reply in replies for span in reply.spans],
    )  # fmt: skip


def single_rows(call: Call) -> list[Call]:
    return [call.rows([row]) for row in range(len(call.expected))]


def busy_seconds(replies: Iterable[Reply]) -> float:
    """Return the seconds during which at least one call was running; calls that overlap are not counted twice."""
    total, until = 0.0, float("-inf")
    for start_s, end_s in sorted(span for reply in replies for span in reply.spans):
        total += max(0.0, end_s - max(start_s, until))
        until = max(until, end_s)
    return total


def finite(value: Any, largest: float = math.inf) -> float | None:
    """Return the value as a finite float; None if it is not a number, or its absolute value exceeds `largest`."""
    # float() would also parse text, but a number given as text is a mistake.
    try:
        number = float(value) if hasattr(value, "__float__") or hasattr(value, "__index__") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) and abs(number) <= largest else None
