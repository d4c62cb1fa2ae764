"""Runs a function that plays the user, in the process that calls it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from hybrid_grpo.config.errors import refuse, type_of
from hybrid_grpo.config.user_code import import_object
from hybrid_grpo.data.episodes import Observation
from hybrid_grpo.distributed.workers.calls import Call, Failure, Interface, Reply, failed
from hybrid_grpo.turns.observations import SHOWS, received, shows_pictures
from hybrid_grpo.turns.tools.functions import Tool, ToolEntry

MESSAGES = "messages"
"""The argument that receives the conversation."""


@dataclass(frozen=True)
class UserEntry(ToolEntry):
    """`rollout.user`, as passed to worker processes."""

    def load(self, name: str) -> UserFunction:
        """Find the function of the entry, which messages call `name`. Raises UserError if there is no such function, or
        if it does not take messages."""
        setting = f"{name} {self.function}"
        function = import_object(self.function, setting)
        signature = inspect.signature(function)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
        named = [name for name, kind in kinds.items() if kind.name in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")]
        refuse(
            MESSAGES not in named and not takes_any,
            f"{setting} has no argument {MESSAGES}: it is called with the conversation as messages, and with columns",
        )
        needed = {name for name in named if signature.parameters[name].default is inspect.Parameter.empty}
        plain = inspect.unwrap(function)
        is_async, shows = inspect.iscoroutinefunction(plain), {"shows": shows_pictures(plain)}
        interface = Interface(sorted(needed - {MESSAGES}), None if takes_any else named, is_async, 1, schema=shows)
        return UserFunction(self.function.rpartition(":")[2], function, signature, interface)

    def checked(self, value: Any, expected: None) -> Observation | None:
        """Return what the user said."""
        return None if value is None else received(value)


class UserFunction(Tool):
    """A function `f(messages, **columns)` that plays the user, called with the columns that it takes. It returns text,
    or what a tool that shows pictures returns, or None."""

    def _called(self, call: Call) -> Any:
        given = call.inputs["arguments"][0]
        return self.function(**{name: value for name, value in given.items() if self.interface.accepts(name)})

    def _reply(self, result: Any) -> Reply:
        if result is None:
            return Reply([None], [None])
        if isinstance(result, str) or self.interface.schema["shows"]:
            return super()._reply(result)
        expected = f"return text, or None to end the conversation; to show pictures, set the attribute {SHOWS}"
        return failed(Failure("invalid", f"returned {type_of(result)}: {expected}"), 1)
