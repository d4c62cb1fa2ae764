"""The user that a function plays, in the process that calls it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.turns.tools.functions import Tool, ToolEntry, as_text, find_function, text_reply
from hybrid_grpo.workers.calls import Call, Failure, Interface, Reply, failed

MESSAGES = "messages"
"""The argument that is given the conversation."""


@dataclass(frozen=True)
class UserEntry(ToolEntry):
    """`rollout.user`, as worker processes are given it."""

    def load(self, name: str) -> UserFunction:
        """See `load_user`."""
        return load_user(self, name)


class UserFunction(Tool):
    """`f(messages, **columns) -> str | None`, which gets the columns that it has arguments for."""

    def _called(self, call: Call) -> Any:
        given = call.inputs["arguments"][0]
        return self.function(**{name: value for name, value in given.items() if self.interface.accepts(name)})

    def _reply(self, result: Any) -> Reply:
        if result is None or isinstance(result, str):
            return text_reply(None if result is None else as_text(result))
        expected = "return text, or None to end the conversation"
        return failed(Failure("invalid", f"returned a {type(result).__name__}: {expected}"), 1)


def load_user(config: UserEntry, entry: str) -> UserFunction:
    """Find the function of an entry; `entry` names it in messages. Raises UserError where there is none, or where it
    takes no messages."""
    setting = f"{entry} {config.function}"
    refuse(
        ":" not in config.function,
        f"{setting}: give a function, as path/to/file.py:function or package.module:function",
    )
    function = find_function(config.function, setting)
    plain, signature = inspect.unwrap(function), inspect.signature(function)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    named = [name for name, kind in kinds.items() if kind.name in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")]
    refuse(
        MESSAGES not in named and not takes_any,
        f"{setting} has no argument {MESSAGES}: it is called with the conversation as messages, and with columns",
    )
    needed = [name for name in named if signature.parameters[name].default is inspect.Parameter.empty]
    columns = sorted({*needed} - {MESSAGES})
    interface = Interface(columns, None if takes_any else named, inspect.iscoroutinefunction(plain), 1)
    file = getattr(getattr(plain, "__code__", None), "co_filename", None)
    return UserFunction(config.function.rpartition(":")[2], function, signature, interface, file)
