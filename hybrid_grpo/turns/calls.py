"""A parsed turn of the model: its text, its tool calls, and what is wrong with them; and the parts into which the
readers of `formats` divide a turn."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid_grpo.data.chat_template import clean

_DEEPEST = 64
"""Maximum nesting depth of a call's arguments: templates, JSON and pickle recurse over them."""
_LONGEST_NUMBER = 4096
"""Maximum bits of a whole number; Python refuses to print numbers of more than 4,300 digits."""
_LONGEST_NAME = 128


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the model."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """The model's own id of the call, in formats that have ids."""


@dataclass(frozen=True)
class Turn:
    """A parsed turn of the model."""

    content: str
    """The text of the turn without the calls."""
    calls: list[ToolCall] = field(default_factory=list)
    fault: str | None = None
    """Why a call cannot be read, as a message to the model; None if all can be read."""


def checked(call: ToolCall) -> ToolCall:
    """Return the call in a form that is safe to handle: its text can be encoded, its numbers are finite, and its lists
    and dictionaries are not nested too deeply. Raises ValueError if it is not a valid call."""
    if not isinstance(call.name, str) or not call.name or len(call.name) > _LONGEST_NAME:
        raise ValueError(f"a call has a name of 1 to {_LONGEST_NAME} characters")
    if not isinstance(call.arguments, dict):
        raise ValueError("the arguments of a call are an object")
    id = clean(call.id) if isinstance(call.id, str) and len(call.id) <= _LONGEST_NAME else None
    return ToolCall(clean(call.name), _plain(call.arguments, 0), id)


def _plain(value: Any, depth: int) -> Any:
    if depth > _DEEPEST:
        raise ValueError(f"arguments are nested more than {_DEEPEST} deep")
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(name)): _plain(part, depth + 1) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part, depth + 1) for part in value]
    fits = isinstance(value, int) and value.bit_length() <= _LONGEST_NUMBER
    if value is None or fits or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"an argument is not a value of JSON, but of type {type(value).__name__}, or too large")


Part = str | ToolCall | Exception
"""A part of a turn: text outside of calls, a call, or why a call cannot be read. Other parts may follow a fault."""
Properties = Mapping[str, Any]
"""The JSON schemas of a tool's arguments, by their names."""
Format = Callable[[str, Mapping[str, Properties]], Iterator[Part]]
"""Divides the text of a turn into parts; the `Properties` of tools, by name, type arguments that are written without
types. An exception that it raises is a fault, too."""


def unended(what: str) -> ValueError:
    """A fault: the text ends within a call."""
    return ValueError(f"{what} does not end")
