"""Runs a function that plays the user, in the process that calls it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.user_code import import_object
from hybrid_grpo.turns.observations import as_text
from hybrid_grpo.turns.tools.functions import Tool, ToolEntry
from hybrid_grpo.workers.calls import Call, Failure, Interface, Reply, failed
from hybrid_grpo.workers.messages import checked_text

MESSAGES = "messages"
"""The argument that receives the conversation."""


@dataclass(frozen=True)
class UserEntry(ToolEntry):
    """`rollout.user`, as passed to worker processes."""

    def load(self, name: str) -> UserFunction:
        """See `load_user`."""
        return load_user(self, name)

    def checked(self, value: Any, expected: None) -> str | None:
        """Return the text that the user said."""
        return None if value is None else checked_text(value)


class UserFunction(Tool):
    """A function `f(messages, **columns) -> str | None` that plays the user, called with the columns that it takes."""

    def _called(self, call: Call) -> Any:
        given = call.inputs["arguments"][0]
        return self.function(**{name: value for name, value in given.items() if self.interface.accepts(name)})

    def _reply(self, result: Any) -> Reply:
        if result is None or isinstance(result, str):
            return Reply([None if result is None else as_text(result)], [None])
        expected = "return text, or None to end the conversation"
        return failed(Failure("invalid", f"returned a {type(result).__name__}: {expected}"), 1)


def load_user(config: UserEntry, entry: str) -> UserFunction:
    """Find the function of an entry; `entry` names the entry in messages. Raises UserError if there is no such
    function, or if it does not take messages."""
    setting = f"{entry} {config.function}"
    function = import_object(config.function, setting)
    signature = inspect.signature(function)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    named = [name for name, kind in kinds.items() if kind.name in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")]
    refuse(
        MESSAGES not in named and not takes_any,
        f"{setting} has no argument {MESSAGES}: it is called with the conversation as messages, and with columns",
    )
    needed = {name for name in named if signature.parameters[name].default is inspect.Parameter.empty}
    is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
    interface = Interface(sorted(needed - {MESSAGES}), None if takes_any else named, is_async, 1)
    return UserFunction(config.function.rpartition(":")[2], function, signature, interface)
