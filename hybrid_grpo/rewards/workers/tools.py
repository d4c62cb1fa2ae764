"""Tools: functions of the user's that a model calls between its turns, in the process that runs them.

A tool is a Python function with type hints and a docstring that describes its arguments, as TRL and transformers have
it. It runs in the same kind of process as a reward function, with the same limits. What it returns becomes text; what
goes wrong becomes a failure, which the model is told.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hybrid_grpo.config.errors import UserError, did_you_mean
from hybrid_grpo.config.importing import describe, functions_of, import_place
from hybrid_grpo.rewards.functions import Failure, Interface, Reply, RewardCall, failed

BUILTINS = ("calculator", "python")
"""Tools that a configuration names without a path; they are defined in ready_made.py."""
RESULT = "result"
"""Name under which a reply holds what a tool returned."""
_LONGEST = 1 << 20  # characters


@dataclass(frozen=True)
class ToolEntry:
    """An entry of `rollout.tools`, as worker processes are given it."""

    function: str
    """`path/to/file.py:name`, `package.module:name` or the name of a built-in."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """No tool has fixed arguments; a reward function may."""


@dataclass(frozen=True)
class Tool:
    """A tool in the process that calls it; has the form of `functions.Function`."""

    name: str
    function: Callable[..., Any]
    interface: Interface
    file: str | None
    """File in which the function is written."""

    def score(self, call: RewardCall) -> Reply:
        """Call the function with the arguments of the call's only row."""
        try:
            result = self._called(call)
            return _reply(asyncio.run(result) if inspect.iscoroutine(result) else result)
        except BaseException as error:  # a SystemExit of the function is no reason to end the process
            return self._failed(error)

    async def score_async(self, call: RewardCall) -> Reply:
        """`score` for an `async def` function."""
        try:
            return _reply(await self._called(call))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return self._failed(error)

    def _called(self, call: RewardCall) -> Any:
        arguments = call.inputs["arguments"][0]
        bound_arguments(self.function, arguments)
        return self.function(**arguments)

    def _failed(self, error: BaseException) -> Reply:
        if isinstance(error, WrongArguments):
            return failed(Failure("invalid", f"wrong arguments for {self.name}: {error}"), 1)
        trace = "".join(traceback.format_exception(error))[-20_000:]
        spent = isinstance(error, MemoryError)
        return failed(Failure("raised", describe(error, None)[:_LONGEST], trace), 1, spent=spent)


class WrongArguments(Exception):
    """The model gave arguments that the function does not take."""


def bound_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raise WrongArguments where a function does not take these."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise WrongArguments(str(error)) from None


def _reply(result: Any) -> Reply:
    return Reply([0.0], [None], {RESULT: [as_text(result)]})


def as_text(result: Any) -> str:
    """What a tool returned as the model reads it."""
    if isinstance(result, bytes | bytearray):
        result = bytes(result).decode(errors="replace")
    if not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False, default=str)
    # A tokenizer cannot read halves of surrogate pairs.
    return result[:_LONGEST].encode(errors="replace").decode()


def load_tool(config: ToolEntry, entry: str) -> Tool:
    """Find the function of an entry and describe it to the model; `entry` names the entry in messages.

    Raises UserError where there is no such function, or where it lacks type hints or a docstring.
    """
    place, colon, name = config.function.rpartition(":")
    setting = f"{entry} {config.function}"
    if not colon:
        if config.function not in BUILTINS:
            raise UserError(
                f"{setting} is no built-in: {did_you_mean(config.function, BUILTINS)}; one of your own is given as"
                " path/to/file.py:function or package.module:function"
            )
        place, name = "hybrid_grpo.rewards.workers.ready_made", config.function
    module = import_place(place, setting)
    function = getattr(module, name, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, name) else "does not exist"
        raise UserError(f"{setting}: {name} {what} in {place}: {did_you_mean(name, functions_of(module))}")
    plain = inspect.unwrap(function)
    schema = described(plain, setting)
    interface = Interface(["arguments"], ["arguments"], inspect.iscoroutinefunction(plain), 1, schema=schema)
    return Tool(schema["function"]["name"], function, interface, getattr(plain.__code__, "co_filename", None))


def described(function: Callable[..., Any], setting: str) -> dict[str, Any]:
    """What a model is told of a function. Raises UserError, which begins with `setting`, where it lacks type hints or a
    docstring."""
    # Late, since only processes with tools need it.
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise UserError(
            f"{setting} cannot be described to the model: {describe(error, None)}: give every argument a type hint and"
            " a line in the docstring's Args"
        ) from error
    return schema
