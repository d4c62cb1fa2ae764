"""Replies of worker processes as messages. What a worker sends is the data of a stranger: the code of a user, or of a
model, may have written it. So everything is checked here, and made anew from plain values, before the rank looks at it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from hybrid_grpo.rewards.functions import Failure, Kind, Reply, ReplyForm, checked, finite, stored

RESULT = "result"
"""Name under which a reply holds what a tool, a user or an environment returned."""
LONGEST_TEXT = 1 << 20
"""Characters of what a tool, a user or an environment says."""
_LONGEST_TRACEBACK = 20_000
_LONGEST_STATE = 1 << 28
"""Characters of the state of an environment."""


@dataclass(frozen=True)
class Expected:
    """What the reply to a call must fit."""

    lengths: Sequence[int]
    """Of the rows, in tokens."""
    form: ReplyForm
    order: str = ""
    """Given to an environment."""


def encode_reply(number: int, reply: Reply) -> bytes:
    """A reply as a message."""
    failures = {row: vars(failure) for row, failure in enumerate(reply.failures) if failure is not None}
    return json.dumps([number, reply.values, failures, reply.extra, reply.spent, reply.whole]).encode()


def new_number() -> int:
    """The number of a call. It is drawn by chance, so that a function can answer no call but its own."""
    return secrets.randbits(52)


def decode_reply(message: bytes, calls: Mapping[int, Expected]) -> tuple[int, Reply] | None:
    """The number of a call under way, and the reply to it; None where the message is about another call. Raises
    ValueError where it is not a reply.

    Args:
        calls: under way, by number.
    """
    try:
        number, values, failures, extra, spent, whole = json.loads(message)
        if type(number) is not int or number not in calls:
            return None
        lengths, form = calls[number].lengths, calls[number].form
        reasons = {int(row): _failure(**reason) for row, reason in failures.items()}
        reply = Reply(
            [checked(value, length) for value, length in zip(values, lengths, strict=True)],
            [reasons.get(row) for row in range(len(lengths))],
            stored(extra, len(lengths)) if form == "rewards" else {},
            spent is True,
            whole is True,
        )
        if form != "rewards" and not any(reply.failures):
            [result] = extra[RESULT]
            reply.extra[RESULT] = [_text(result) if form == "text" else _event(result, calls[number].order)]
        return number, reply
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError("no reply") from error


def _failure(kind: Any, message: Any, traceback: Any) -> Failure:
    if kind not in get_args(Kind):
        raise ValueError(kind)
    return Failure(kind, _clean(message, LONGEST_TEXT), _clean(traceback, _LONGEST_TRACEBACK))


def _clean(text: Any, longest: int) -> str:
    """Text of at most this length, without the halves of surrogate pairs, which no file and no tokenizer takes."""
    if not isinstance(text, str):
        raise TypeError(text)
    return text[:longest].encode(errors="replace").decode()


def _text(text: Any) -> str | None:
    return None if text is None else _clean(text, LONGEST_TEXT)


def _event(found: Any, order: str) -> dict[str, Any]:
    """What came of an order to an environment; see `environments.EnvironmentProcess`."""
    event = {name: _FIELDS[name](found[name]) for name in _ORDERS[order]}
    if order == "step" and "end" in found:
        event["end"] = _event(found["end"], "end")
    return event


def _reward(value: Any) -> float | None:
    number = finite(value)
    if number is None and value is not None:
        raise ValueError(value)
    return number


def _state(state: Any) -> dict[str, Any]:
    return {
        "place": _clean(state["place"], LONGEST_TEXT),
        "class": _clean(state["class"], LONGEST_TEXT),
        "attributes": _texts(state["attributes"]),
        "missing": _texts(state["missing"]),
    }


def _texts(texts: Any) -> dict[str, str]:
    found = {_clean(name, LONGEST_TEXT): _clean(text, _LONGEST_STATE) for name, text in texts.items()}
    if sum(map(len, found.values())) > _LONGEST_STATE:
        raise ValueError("too long")
    return found


_FIELDS: dict[str, Callable[[Any], Any]] = {"text": _text, "reward": _reward, "done": bool, "state": _state}
_ORDERS = {
    "begin": ["text"],
    "call": ["text"],
    "step": ["text", "reward", "done"],
    "end": ["reward", "state"],
    "close": [],
}
"""What came of each order to an environment; a step may also have an `end`."""
