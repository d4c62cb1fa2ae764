"""Environments of the package `openenv`: either an environment class, run in this process without a server, or a client
of a server.

The text of a turn becomes an action, and the observation becomes text. If the actions are tool calls (MCP), the model
calls the same tools.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.user_code import describe

PACKAGE = "openenv"
_HIDDEN = ("done", "reward", "metadata")
"""Fields of all observations and actions that the model does not see."""


@dataclass(frozen=True)
class Adapted:
    """An entry that is an environment of openenv, or a client."""

    factory: Callable[[], OpenenvActions | OpenenvTools]
    """Makes the object that runs one completion."""
    tools: list[dict[str, Any]]
    """JSON schemas of the tools; if there are none, every turn is an action."""


def is_foreign(kind: type) -> bool:
    """Whether a class is an environment of openenv, or a client."""
    return bool(_bases(kind) & {"Environment", "EnvClient", "SyncEnvClient"})


def adapted(factory: Callable[[], Any], made: Any, setting: str) -> Adapted:
    """Return how to run an environment or client.

    Raises UserError if the type of its actions is unknown.

    Args:
        factory: the class, or a function that returns an object.
        made: an object that the factory has returned; None if it is a class.
        setting: the name with which error messages begin.
    """
    if made is None and not _bases(factory) & {"Environment"}:  # type: ignore[arg-type]
        raise UserError(
            f"{setting}: a client needs the address of its server: give a function that returns"
            f" {factory.__name__}(base_url=...)"
        )
    kind: Any = factory if made is None else type(getattr(made, "async_client", made))
    if not _bases(kind) & {"MCPEnvironment", "MCPClientBase"}:
        read = _reader(kind, setting)
        with suppress(Exception):  # the function may have connected it, or started its server
            _synchronous(made).close()
        return Adapted(lambda: OpenenvActions(factory(), read), [])
    try:
        tools = _listed(factory() if made is None else made)
    except Exception as error:
        raise UserError(f"{setting}: asking for its tools raised {describe(error, None)}") from error
    if not tools:
        raise UserError(f"{setting} has no tools that the model could call")
    names = [tool["function"]["name"] for tool in tools]
    return Adapted(lambda: OpenenvTools(factory(), names), tools)


class OpenenvRollout:
    """One completion of an environment of openenv."""

    def __init__(self, environment: Any) -> None:
        self._is_client = not _bases(type(environment)) & {"Environment"}
        self._environment = _synchronous(environment)

    def reset(self, seed: int | None = None, **columns: Any) -> Any:
        reset, given = _method(self._environment, "reset"), {"seed": seed, **columns}
        parameters = inspect.signature(reset).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            given = {name: given[name] for name in given if name in parameters}
        return _then(reset(**given), _begun)

    def close(self) -> Any:
        return self._environment.close()

    def carried(self) -> Any:
        """Return what reward functions receive as the completion's environment; for a client, an empty object."""
        return object() if self._is_client else self._environment


class OpenenvActions(OpenenvRollout):
    """A completion whose turns are actions. `read` parses a text into an action, and raises ValueError if it cannot."""

    def __init__(self, environment: Any, read: Callable[[str], Any]) -> None:
        super().__init__(environment)
        self._read = read

    def step(self, text: str) -> Any:
        """Carry out a turn. A text that is not an action earns 0, and its observation is the error."""
        try:
            action = self._read(text)
        except ValueError as error:
            return f"error: {_what_is_wrong(error)}", 0.0, False
        return _then(_method(self._environment, "step")(action), lambda r: (_observed(r) or "", r.reward, r.done))


class OpenenvTools(OpenenvRollout):
    """A completion that calls tools. The rewards of its calls are added up."""

    def __init__(self, environment: Any, tools: list[str]) -> None:
        super().__init__(environment)
        self._earned = 0.0
        self._done = False
        for tool in tools:
            setattr(self, tool, partial(self._call, tool))

    def get_reward(self) -> float:
        return self._earned

    def _call(self, tool: str, /, **arguments: Any) -> Any:
        from openenv.core.env_server.mcp_types import CallToolAction

        if self._done:
            raise ValueError("it is over: no more calls")
        result = self._environment.step(CallToolAction(tool_name=tool, arguments=arguments))
        self._done = bool(result.done)
        if result.reward is not None:
            self._earned += result.reward
        observation = getattr(result, "observation", result)
        if getattr(observation, "error", None) is not None:
            raise ValueError(observation.error.message)
        return _content(observation.result) if hasattr(observation, "result") else _observed(observation) or ""


def _bases(kind: type) -> set[str]:
    """Return the names of openenv's classes that a class is derived from."""
    return {base.__name__ for base in inspect.getmro(kind) if base.__module__.startswith(f"{PACKAGE}.")}


def _synchronous(environment: Any) -> Any:
    """Return the environment, or a client's synchronous form, whose own loop answers the server between turns too."""
    return environment.sync() if "EnvClient" in _bases(type(environment)) else environment


def _method(environment: Any, name: str) -> Callable[..., Any]:
    """A method of an environment. Like openenv's servers, prefers the async form if the user's own class defines it."""
    later = f"{name}_async"
    owner = next((kind for kind in inspect.getmro(type(environment)) if later in vars(kind)), None)
    is_own = owner is not None and not owner.__module__.startswith(f"{PACKAGE}.")
    method: Callable[..., Any] = getattr(environment, later if is_own else name)
    return method


def _then(result: Any, use: Callable[[Any], Any]) -> Any:
    """Apply `use` to a result, which is awaited first if it is awaitable."""
    if not inspect.isawaitable(result):
        return use(result)

    async def later() -> Any:
        return use(await result)

    return later()


def _listed(environment: Any) -> list[dict[str, Any]]:
    """Return the JSON schemas of an environment's tools. Closes the environment."""
    from openenv.core.env_server.mcp_types import ListToolsAction

    asked = _synchronous(environment)
    try:
        result = asked.step(ListToolsAction())
    finally:
        asked.close()
    return [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.input_schema}}
        for t in getattr(result, "observation", result).tools
    ]


def _reader(kind: type, setting: str) -> Callable[[str], Any]:
    """Return a parser of actions: a text is the value of the only required field, or otherwise JSON of all fields.
    Raises UserError if the type of the actions is unknown."""
    actions = [action for action in _actions(kind) if not action.__module__.endswith(".mcp_types")]
    known = [action for action in actions if get_origin(action) is dict or _fields(action)]
    if not known or len(known) < len(actions):
        raise UserError(f"{setting}: the type of its actions is not known: annotate the argument of step with it")
    accepted: Any = Union[tuple(known)]  # noqa: UP007  # their number is only known here
    adapter: TypeAdapter[Any] = TypeAdapter(accepted)
    fields = _fields(known[0]) if len(known) == 1 else {}
    named = [name for name in fields if fields[name].is_required()] or list(fields)

    def read(text: str) -> Any:
        if len(named) != 1:
            return adapter.validate_json(text)
        try:
            return adapter.validate_python({named[0]: text})
        except ValidationError:
            if not text.lstrip().startswith("{"):
                raise
            return adapter.validate_json(text)

    return read


def _actions(kind: type) -> list[Any]:
    """Return the action types of an environment or client, from the annotation of `step` or the generic base class."""
    found: Any = None
    with suppress(Exception):  # annotations may use names that are imported for type checkers only
        step: Any = kind.step  # type: ignore[attr-defined]
        found = get_type_hints(step).get(list(inspect.signature(step).parameters)[1])
    if not _is_known(found):
        generic = [base for part in inspect.getmro(kind) for base in vars(part).get("__orig_bases__", ())]
        found = next((args[0] for base in generic if (args := get_args(base)) and _is_known(args[0])), None)
    if get_origin(found) in (Union, UnionType):
        return list(get_args(found))
    return [] if found is None else [found]


def _is_known(action: Any) -> bool:
    """Whether a type specifies the actions."""
    return get_origin(action) in (Union, UnionType, dict) or bool(_fields(action))


def _fields(action: Any) -> dict[str, Any]:
    """Return the fields of an action type that the model sees."""
    if not (inspect.isclass(action) and issubclass(action, BaseModel)):
        return {}
    return {name: field for name, field in action.model_fields.items() if name not in _HIDDEN}


def _what_is_wrong(error: ValueError) -> str:
    """Return the reason why a text is not an action."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
    return "; ".join(f"{place}: {message}" if place else message for place, message in found)


def _observed(result: Any) -> str | None:
    """Return an observation as the model reads it: its only field if that is text, otherwise JSON of all fields; None
    if there are no fields."""
    seen = getattr(result, "observation", result)
    if isinstance(seen, BaseModel):
        seen = seen.model_dump(mode="json")
    fields = {name: v for name, v in (seen if isinstance(seen, dict) else vars(seen)).items() if name not in _HIDDEN}
    if not fields:
        return None
    if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
        return only
    return json.dumps(fields, ensure_ascii=False, default=str)


def _begun(result: Any) -> str | None:
    """Return the initial observation, which follows the prompt."""
    text = _observed(result)
    return f"\n\n{text}" if text else None


def _content(result: Any) -> Any:
    """Return a tool's return value, taken out of FastMCP's result object or its JSON."""
    parts = result if isinstance(result, dict) else getattr(result, "__dict__", {})
    if not {"data", "content"} <= parts.keys():
        return result
    if parts["data"] is not None:
        return parts["data"]
    texts = [one.get("text") if isinstance(one, dict) else getattr(one, "text", None) for one in parts["content"] or []]
    return "\n".join(text for text in texts if text is not None)
