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
from functools import partial
from typing import Any

from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.config.user_code import describe, functions_of, import_place
from hybrid_grpo.workers.calls import Call, Failure, Interface, Reply, failed
from hybrid_grpo.workers.messages import LONGEST_TEXT, LONGEST_TRACEBACK, checked_text

BUILTINS = ("calculator", "python", "search")
"""Tools that a configuration names without a path; they are defined in builtins.py and search.py."""


@dataclass(frozen=True)
class ToolEntry:
    """An entry of `rollout.tools`, as worker processes are given it."""

    function: str
    """`path/to/file.py:name`, `package.module:name` or the name of a built-in."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments that are the same in every call, of which the model is not told."""

    def load(self, name: str) -> Tool:
        """See `load_tool`."""
        return load_tool(self, name)

    def checked(self, value: Any, expected: None) -> str | None:
        """What a tool or a user says."""
        return None if value is None else checked_text(value)


@dataclass(frozen=True)
class Tool:
    """A tool in the process that calls it; a `Callee`."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    """What the model may give."""
    interface: Interface
    file: str | None
    """File in which the function is written."""

    def reply(self, call: Call) -> Reply:
        """Call the function with the arguments of the call's only row."""
        try:
            result = self._called(call)
            return self._reply(asyncio.run(result) if inspect.iscoroutine(result) else result)
        except BaseException as error:  # a SystemExit of the function is no reason to end the process
            return self._failed(error)

    async def reply_async(self, call: Call) -> Reply:
        """`reply` for an `async def` function."""
        try:
            return self._reply(await self._called(call))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return self._failed(error)

    def _called(self, call: Call) -> Any:
        arguments = call.inputs["arguments"][0]
        check_arguments(self.signature, arguments)
        return self.function(**arguments)

    def _reply(self, result: Any) -> Reply:
        return text_reply(as_text(result))

    def _failed(self, error: BaseException) -> Reply:
        if isinstance(error, WrongArguments):
            return failed(Failure("invalid", f"wrong arguments for {self.name}: {error}"), 1)
        trace = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
        spent = isinstance(error, MemoryError)
        return failed(Failure("raised", describe(error, None)[:LONGEST_TEXT], trace), 1, spent=spent)


class WrongArguments(Exception):
    """The model gave arguments that the function does not take."""


def check_arguments(signature: inspect.Signature, arguments: dict[str, Any]) -> None:
    """Raise WrongArguments where a function of this signature does not take these."""
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise WrongArguments(str(error)) from None


def text_reply(text: str | None) -> Reply:
    """The reply with what is said to the model."""
    return Reply([text], [None])


def as_text(result: Any) -> str:
    """What a tool returned as the model reads it."""
    if isinstance(result, bytes | bytearray):
        result = bytes(result).decode(errors="replace")
    if not isinstance(result, str):
        result = json.dumps(result, ensure_ascii=False, default=str)
    return checked_text(result)


def load_tool(config: ToolEntry, entry: str) -> Tool:
    """Find the function of an entry and describe it to the model; `entry` names the entry in messages.

    Raises UserError where there is no such function, or where it lacks type hints or a docstring.
    """
    setting = f"{entry} {config.function}"
    function, fixed = _function(config, setting)
    plain = inspect.unwrap(function)
    schema = described(plain, setting)
    told = schema["function"]["parameters"]
    told["properties"] = {name: told["properties"][name] for name in told["properties"] if name not in fixed}
    if "required" in told:
        told["required"] = [name for name in told["required"] if name not in fixed]
    is_async = inspect.iscoroutinefunction(plain)
    interface = Interface(["arguments"], ["arguments"], is_async, 1, schema=schema)
    parameters = inspect.signature(function).parameters
    given = inspect.Signature([parameter for name, parameter in parameters.items() if name not in fixed])
    file = getattr(plain.__code__, "co_filename", None)
    return Tool(schema["function"]["name"], partial(function, **fixed), given, interface, file)


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


def _function(config: ToolEntry, setting: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of an entry, and the arguments that are the same in every call of it."""
    if config.function != "search":
        function = find_function(config.function, setting)
        _check_kwargs(function, config.kwargs, setting)
        return function, config.kwargs
    # Late, since only processes that search need numpy.
    from hybrid_grpo.turns.tools.search import search_tool

    _check_kwargs(search_tool, config.kwargs, setting)
    try:
        return search_tool(**config.kwargs), {}
    except ValueError as error:
        raise UserError(f"{setting}: {error}") from None


def _check_kwargs(function: Callable[..., Any], kwargs: dict[str, Any], setting: str) -> None:
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in kwargs:
        refuse(
            name not in parameters and not takes_any,
            f"{setting}: kwargs {name}: there is no such argument: {did_you_mean(name, parameters)}",
        )


def find_function(spec: str, setting: str) -> Callable[..., Any]:
    """The function that a configuration names; `setting` begins the messages."""
    place, colon, name = spec.rpartition(":")
    if not colon:
        if spec not in BUILTINS:
            raise UserError(
                f"{setting} is not a built-in: {did_you_mean(spec, BUILTINS)}; one of your own is given as"
                " path/to/file.py:function or package.module:function"
            )
        place, name = "hybrid_grpo.turns.tools.builtins", spec
    module = import_place(place, setting)
    function = getattr(module, name, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, name) else "does not exist"
        raise UserError(f"{setting}: {name} {what} in {place}: {did_you_mean(name, functions_of(module))}")
    return function
