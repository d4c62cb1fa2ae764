"""What the readers of formats have in common: a turn falls into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybrid_grpo.turns.calls import ToolCall

Part = str | ToolCall | Exception
"""A part of a turn: text outside of calls, a call, or why one cannot be read. After a fault, more may follow."""
Properties = Mapping[str, Any]
"""What a tool's JSON schema says of its arguments, by their names."""
Format = Callable[[str, Mapping[str, Properties]], Iterator[Part]]
"""From the text of a turn to its parts; the tools' `Properties` by name type arguments that are written without types.
Whatever it raises is a fault, too."""


def unended(what: str) -> ValueError:
    """A fault: the text ends within a call."""
    return ValueError(f"{what} does not end")
