"""The messages between a rank and its worker processes, each preceded by its length.

Calls are pickled; replies are JSON. What a worker sends cannot be trusted: the code of a user, or of a model, may have
written it. So everything is checked here, and rebuilt from plain values, before the rank uses it.
"""

import asyncio
import json
import pickle
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, get_args

from hybrid_grpo.distributed.workers.calls import LONGEST_TRACEBACK, Call, Entry, Failure, Kind, Reply, finite

LONGEST_TEXT = 1 << 20
"""Maximum number of characters of a failure's message, and of a value that is text."""
_MOST_COLUMNS, _LONGEST_NAME, _LONGEST_STORED = 64, 100, 10_000
"""Limits on what is stored with a call's values: columns, characters of a name, and characters of a stored value."""
_LARGEST_WHOLE = 2**63


_HEADER = struct.Struct(">I")
"""Length of the message that follows, in the format of multiprocessing's Connection (up to 2 GiB)."""
_LARGEST_REPLY = 1 << 28


@dataclass(frozen=True)
class PendingCall:
    """A call that is sent to a worker and awaits a reply."""

    entry: Entry
    expected: Sequence[Any]
    """One element per row, which is passed to `Entry.checked` together with the row's value."""
    number: int
    message: bytes
    """The encoded call, as it is sent."""

    @classmethod
    def of(cls, entry: Entry, index: int, call: Call, timeout_s: float) -> Self:
        """Make a call to the entry with this index. Raises whatever the pickling of the call raises."""
        number = secrets.randbits(52)  # random, so that a function can answer no call but its own
        return cls(entry, call.expected, number, framed(pickle.dumps((number, index, call, timeout_s))))


def framed(message: bytes) -> bytes:
    return _HEADER.pack(len(message)) + message


def unframed(received: bytearray) -> bytes | None:
    """Remove the first message from the bytes that a worker sent, and return it; None if it is not complete yet. Raises
    ValueError if the message is longer than a reply may be."""
    if len(received) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack_from(received)
    if size > _LARGEST_REPLY:
        raise ValueError(f"a message of {size} bytes")
    end = _HEADER.size + size
    if len(received) < end:
        return None
    message = bytes(received[_HEADER.size : end])
    del received[:end]
    return message


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read the next message from the rank. Raises IncompleteReadError if the rank sends no more."""
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return await reader.readexactly(size)


def encode_reply(number: int, reply: Reply) -> bytes:
    """Encode the reply to the call with this number as a message, without the length that precedes it."""
    failures = {row: vars(failure) for row, failure in enumerate(reply.failures) if failure is not None}
    return json.dumps([number, reply.values, failures, reply.extra, reply.spent, reply.whole]).encode()


def decode_reply(message: bytes, calls: Mapping[int, PendingCall]) -> tuple[int, Reply] | None:
    """Return the number of a call and the reply to it; None if that call is not among `calls`. Raises ValueError if the
    message is not a reply.

    Args:
        calls: the calls in progress, by number.
    """
    try:
        number, values, failures, extra, spent, whole = json.loads(message)
        if type(number) is not int or number not in calls:
            return None
        entry, rows = calls[number].entry, calls[number].expected
        reasons = {int(row): _failure(**reason) for row, reason in failures.items()}
        values = [
            None if index in reasons else entry.checked(value, row)
            for index, (value, row) in enumerate(zip(values, rows, strict=True))
        ]
        failed = [reasons.get(index) for index in range(len(rows))]
        return number, Reply(values, failed, stored(extra, len(rows)), spent is True, whole is True)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError("no reply") from error


def _failure(kind: Any, message: Any, traceback: Any) -> Failure:
    if kind not in get_args(Kind):
        raise ValueError(kind)
    return Failure(kind, checked_text(message), checked_text(traceback, LONGEST_TRACEBACK))


def checked_text(text: Any, longest: int = LONGEST_TEXT) -> str:
    """Return the text, cut to this length, with lone surrogates replaced. Raises TypeError if `text` is not text."""
    if not isinstance(text, str):
        raise TypeError(text)
    return text[:longest].encode(errors="replace").decode()


def stored(extra: dict[str, list[Any]], rows: int) -> dict[str, list[Any]]:
    """Convert the columns that a callee wants stored to plain values. Columns that do not have `rows` elements are left
    out, as are columns beyond `_MOST_COLUMNS`; long text is cut."""
    columns = [(str(name)[:_LONGEST_NAME], column) for name, column in extra.items() if len(column) == rows]
    return {checked_text(name): [_plain(v) for v in column] for name, column in columns[:_MOST_COLUMNS]}


def _plain(value: Any) -> Any:
    """A value that JSON can hold: numbers and text as they are, anything else as text."""
    if value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < _LARGEST_WHOLE):
        return value
    number = None if isinstance(value, str) else finite(value)
    return checked_text(str(value), _LONGEST_STORED) if number is None else number
