"""The parts into which the readers of formats divide a turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hybrid_grpo.turns.calls import ToolCall

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
