"""Runs tools in the process that calls them: users' functions that a model calls between its turns.

A tool is a Python function with type hints and a docstring that describes its arguments, as in TRL and transformers.
The model reads the return value, or the message of the exception that the function raises.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.config.user_code import describe, import_object
from hybrid_grpo.distributed.workers.calls import Call, Failure, Interface, Reply, failed, raised
from hybrid_grpo.distributed.workers.messages import LONGEST_TEXT
from hybrid_grpo.rewards.code.containment import PROTECTIONS, Limits
from hybrid_grpo.turns.observations import Unreadable, observed, received, sent, shows_pictures

_LONGEST = 1_000
"""Maximum number of characters in an expression, which bounds the time and the nesting of brackets."""
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_PROGRAM_S = 10.0


@dataclass(frozen=True)
class ToolEntry:
    """An entry of `rollout.tools`, as passed to worker processes."""

    function: str
    """`path/to/file.py:name`, `package.module:name` or the name of a built-in."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments that are the same in every call; the description for the model omits them."""

    def load(self, name: str) -> Tool:
        """Find the function of the entry, which messages call `name`, and describe it for the model. Raises UserError
        if there is no such function, or if it lacks type hints or a docstring."""
        setting = f"{name} {self.function}"
        function, fixed = self._function(setting), self.kwargs
        plain = inspect.unwrap(function)
        schema = described(plain, setting)
        shown = schema["function"]["parameters"]
        shown["properties"] = {name: shown["properties"][name] for name in shown["properties"] if name not in fixed}
        if "required" in shown:
            shown["required"] = [name for name in shown["required"] if name not in fixed]
        of_tool = {"function": schema, "shows": shows_pictures(plain)}
        interface = Interface(["arguments"], ["arguments"], inspect.iscoroutinefunction(plain), 1, schema=of_tool)
        parameters = inspect.signature(function).parameters
        signature = inspect.Signature([parameter for name, parameter in parameters.items() if name not in fixed])
        return Tool(schema["function"]["name"], partial(function, **fixed), signature, interface)

    def _function(self, setting: str) -> Callable[..., Any]:
        name = self.function
        if name in BUILTINS:
            function: Callable[..., Any] = BUILTINS[name]
        else:
            own = "one of your own is path/to/file.py:function or package.module:function"
            refuse(":" not in name, f"{setting} is not a built-in: {did_you_mean(name, BUILTINS)}; {own}")
            function = import_object(name, setting)
        parameters = inspect.signature(function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for kwarg in self.kwargs:
            refuse(
                kwarg not in parameters and not takes_any,
                f"{setting}: kwargs {kwarg}: there is no such argument: {did_you_mean(kwarg, parameters)}",
            )
        return function

    def checked(self, value: Any, expected: None) -> Any:
        """Return what a tool returned, as an `Observation`."""
        return received(value)


@dataclass(frozen=True)
class Tool:
    """A `Callee` whose calls have one row: the arguments of the function."""

    name: str
    function: Callable[..., Any]
    signature: inspect.Signature
    """The parameters that the model may give."""
    interface: Interface

    def reply(self, call: Call) -> Reply:
        try:
            result = self._called(call)
            return self._reply(asyncio.run(result) if inspect.iscoroutine(result) else result)
        except BaseException as error:  # including SystemExit, which must not end the process
            return self._failed(error)

    async def reply_async(self, call: Call) -> Reply:
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
        return Reply([sent(observed(result, shows=self.interface.schema["shows"]))], [None])

    def _failed(self, error: BaseException) -> Reply:
        if isinstance(error, WrongArguments):
            return failed(Failure("invalid", f"wrong arguments for {self.name}: {error}"), 1)
        if isinstance(error, Unreadable):
            return failed(Failure("invalid", f"{self.name} {error}"), 1)
        return raised(error, describe(error, None)[:LONGEST_TEXT], 1)


class WrongArguments(Exception):
    """The model gave arguments that the function does not take."""


def check_arguments(signature: inspect.Signature, arguments: dict[str, Any]) -> None:
    """Raise WrongArguments if a function with this signature does not take these arguments."""
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise WrongArguments(str(error)) from None


def described(function: Callable[..., Any], setting: str) -> dict[str, Any]:
    """Return the JSON schema of a function. Raises UserError, which begins with `setting`, if it cannot be made."""
    # Late, since only processes with tools need it.
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:
        raise UserError(
            f"{setting} cannot be described to the model: {describe(error, None)}: complete type hints and Args"
        ) from error
    return schema


def calculator(expression: str) -> str:
    """
    Calculate the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / and brackets, such as (3 + 4.5) * 2
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, KeyError, RecursionError, MemoryError):
        raise ValueError("not an expression of numbers, + - * / and brackets") from None
    return str(value) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.AST) -> Fraction:
    """Return the exact value of a syntax tree; raises KeyError for anything but numbers and the four operations."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if not isinstance(node, ast.BinOp):
        raise KeyError(node)
    value: Fraction = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    return value


def python(code: str) -> str:
    """
    Run a program in Python, and give back what it prints.

    Args:
        code: the program; it has no network, and no files but its own.
    """
    # Late: only processes that run programs need it.
    from hybrid_grpo.rewards.code.code_tests import own_sandbox

    result = own_sandbox(tuple(PROTECTIONS)).run(code, "", Limits(timeout_s=_PROGRAM_S))
    if result.end == "exited" and result.status == 0:
        return result.stdout
    why = result.stderr.strip().splitlines()[-1:] if result.end == "exited" else [f"ended by {result.end}"]
    return "\n".join(filter(None, [result.stdout, *why]))


BUILTINS = {"calculator": calculator, "python": python}
"""Tools that a configuration names without a path."""
