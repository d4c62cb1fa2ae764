"""Environment instances: objects of users' classes that answer the turns of one completion, in a worker process.

In TRL's kind of class, public methods other than `reset`, `get_reward` and `close` are tools. In the other kind, `step`
takes the text of a turn and returns `(observation, reward, done)`, Gymnasium's five values, or an object with
`observation`, `reward` and `done`. A `step` without arguments, or whose docstring has `Args:`, is a tool.

Both kinds have `reset`, which receives the columns of the row and may return an initial observation, which the model
reads at the end of the prompt. What the model reads is text or, if the class says `shows_pictures = True`, also a
picture (PIL's, or a file's bytes), or a list of texts and pictures. `get_reward` and `close`, if defined, are called at
the end. All methods may be async.

An object has a process of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import MethodType
from typing import Any

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.user_code import describe, import_object, import_place
from hybrid_grpo.data.episodes import Observation
from hybrid_grpo.distributed.workers.calls import Call, Failure, Interface, Reply, failed, raised
from hybrid_grpo.distributed.workers.messages import checked_text
from hybrid_grpo.distributed.workers.snapshots import state_of
from hybrid_grpo.rewards.functions import finite_reward
from hybrid_grpo.turns.observations import Unreadable, digest, observed, received, sent, shows_pictures
from hybrid_grpo.turns.tools.functions import WrongArguments, check_arguments, described

_LONGEST_STATE = 1 << 28
"""Maximum number of characters in the state of an environment."""
_OWN = ("reset", "get_reward", "close")
"""Methods that are not tools."""


@dataclass(frozen=True)
class EnvironmentEntry:
    """An entry of `rollout.environment`, as passed to worker processes."""

    factory: str
    """`path/to/file.py:Class` or `package.module:Class`; also a function that returns an object."""

    def load(self, name: str) -> EnvironmentProcess:
        """Find the class of the entry, which messages call `name`; raises UserError if it is no environment."""
        place, setting = self.factory.rpartition(":")[0], f"{name} {self.factory}"
        factory: Any = import_object(self.factory, setting)
        try:
            kind = factory if inspect.isclass(factory) else type(factory())
        except Exception as error:
            raise UserError(f"{setting}: making an environment raised {describe(error, None)}") from error
        refuse(
            any(base.__module__.startswith("openenv.") for base in kind.__mro__),
            f"{setting} is openenv's {kind.__name__}, whose turns are not text: wrap it in one with reset and step",
        )
        methods = dict(inspect.getmembers(kind, predicate=inspect.isfunction))
        refuse(
            "reset" not in methods, f"{setting} has no method reset: an environment has one, which may return nothing"
        )
        tools, reset = _tools(methods, setting), inspect.signature(methods["reset"])
        silent = reset.return_annotation in (None, "None")
        schema = {"steps": not tools, "silent": silent, "tools": tools, "shows": shows_pictures(kind)}
        needed = [
            parameter.name
            for parameter in list(reset.parameters.values())[1:]
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and parameter.name != "seed"
        ]
        interface = Interface(needed, None, False, 1, schema=schema)
        return EnvironmentProcess(place, factory, interface, getattr(import_place(place, setting), "__file__", None))

    def checked(self, value: Any, expected: str) -> dict[str, Any]:
        """Return the result of a request whose `do` is `expected`, in a form that is safe to use."""
        event = {name: _FIELDS[name](value[name]) for name in _EVENTS[expected]}
        if expected == "step" and "end" in value:
            event["end"] = self.checked(value["end"], "end")
        return event


class _Refused(ValueError):
    """The object did something that is not allowed."""


def _reward(value: Any, method: str = "it") -> float | None:
    number = finite_reward(value)
    if number is None and value is not None:
        raise _Refused(f"returned the reward {value!r:.100} from {method}: return a finite number or None")
    return number


def _checked_state(state: Any) -> dict[str, Any]:
    texts = {name: checked_text(state[name]) for name in ("place", "class")}
    return {**texts, **{name: _checked_texts(state[name]) for name in ("attributes", "missing")}}


def _checked_texts(texts: Any) -> dict[str, str]:
    found = {checked_text(name): checked_text(text, _LONGEST_STATE) for name, text in texts.items()}
    if sum(map(len, found.values())) > _LONGEST_STATE:
        raise ValueError("too long")
    return found


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "said": lambda value: None if value is None else received(value),
    "reward": _reward,
    "done": bool,
    "state": _checked_state,
}
_EVENTS: dict[str, list[str]] = {"begin": ["said"], "call": ["said"], "step": ["said", "reward", "done"]}
_EVENTS |= {"end": ["reward", "state"], "close": []}
"""The fields of each request's result. The result of the last step also has an `end`."""


class EnvironmentProcess:
    """The object of an entry in a worker process; a `Callee`.

    A call has one row, a request: a mapping with `do`, which is `begin`, `call`, `step`, `end` or `close`; the rest are
    arguments of the method below that carries it out. The value of the reply is the result.
    """

    def __init__(self, place: str, factory: Callable[[], Any], interface: Interface, file: str | None) -> None:
        self.interface = interface
        self._place, self._factory, self._file = place, factory, file
        self._instance: Any = None
        """The object; None before `begin` and after `close`."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def reply(self, call: Call) -> Reply:
        request = dict(call.inputs["request"][0])
        do = request.pop("do")
        try:
            if do not in ("begin", "close") and self._instance is None:
                raise _Refused("was not reset")
            return Reply([getattr(self, f"_{do}")(**request)], [None])
        except (_Refused, Unreadable) as refusal:
            return failed(Failure("invalid", str(refusal)), 1)
        except WrongArguments as error:
            return failed(Failure("invalid", f"wrong arguments for {request['tool']}: {error}"), 1)
        except BaseException as error:  # including SystemExit, which must not end the process
            # The model reads a method's error message in the same form as another tool's.
            message = describe(error, None) if do == "call" else f"raised {describe(error, self._file)}"
            return raised(error, message, 1)

    async def reply_async(self, call: Call) -> Reply:
        return self.reply(call)

    def _begin(
        self, columns: dict[str, Any], seed: int, observation: str | None, pictures: list[str], is_first: bool
    ) -> dict[str, Any]:
        """Make an object and reset it. Unless `is_first`, it must show `observation`, and pictures of these digests."""
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        self._instance = self._factory()
        parameters = inspect.signature(self._instance.reset).parameters
        given = columns if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else {}
        given = given | {name: columns[name] for name in parameters if name in columns}
        if "seed" in parameters and "seed" not in columns:
            given = given | {"seed": seed}
        result = self._waited(self._instance.reset(**given))
        if isinstance(result, tuple) and len(result) == 2:
            result = result[0]  # Gymnasium's pair
        result = getattr(result, "observation", result)
        said = None if result is None else self._observed(result)
        refuse_other = "draw from `random` or numpy's global generator, which are seeded before"
        if not is_first and (list(map(digest, said.pictures)) if said else []) != pictures:
            raise _Refused(f"showed other pictures when it was reset than when it was for the prompt: {refuse_other}")
        if not is_first and (text := said and said.text) != observation:
            raise _Refused(
                f"said {text!r:.200} when it was reset, and {observation!r:.200} when it was reset for the prompt:"
                f" {refuse_other}, and annotate reset with None only if it returns nothing"
            )
        return {"said": sent(said) if said and is_first else None}

    def _call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        method = getattr(self._instance, tool)
        check_arguments(inspect.signature(method), arguments)
        return {"said": sent(self._observed(self._waited(method(**arguments))))}

    def _step(self, text: str, is_last: bool) -> dict[str, Any]:
        """Carry out a step, and end the object if it is done or the turn is the last."""
        observation, reward, done = _stepped(self._waited(self._instance.step(text)))
        said = sent(self._observed("" if observation is None else observation))
        found = {"said": said, "reward": _reward(reward, "step"), "done": bool(done)}
        return {**found, "end": self._end()} if done or is_last else found

    def _end(self) -> dict[str, Any]:
        gives_reward = callable(getattr(self._instance, "get_reward", None))
        reward = self._waited(self._instance.get_reward()) if gives_reward else None
        return {"reward": _reward(reward, "get_reward"), "state": state_of(self._instance, self._place)}

    def _close(self) -> None:
        """Close the object, if there is one. What closing raises is ignored."""
        instance, self._instance = self._instance, None
        close = getattr(instance, "close", None)
        if callable(close):
            with suppress(Exception):
                self._waited(close())

    def _observed(self, result: Any) -> Observation:
        return observed(result, shows=self.interface.schema["shows"])

    def _waited(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        # One loop for all methods: one of them may open a connection that another uses.
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(result)


def _stepped(result: Any) -> tuple[Any, Any, bool]:
    """Return observation, reward and done from the return value of `step`."""
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, terminated, truncated, _ = result
        done = terminated or truncated
    elif isinstance(result, tuple) and len(result) == 3:
        observation, reward, done = result
    elif hasattr(result, "reward") and hasattr(result, "done"):
        observation, reward, done = getattr(result, "observation", result), result.reward, result.done
    else:
        raise _Refused(
            f"returned {result!r:.100} from step: return (observation, reward, done), Gymnasium's five values, or an"
            " object with observation, reward and done"
        )
    return observation, reward, done


def _tools(methods: dict[str, Any], setting: str) -> list[dict[str, Any]]:
    """Return JSON schemas of the methods that are tools; none if every turn is a step."""
    step = methods.get("step")
    # The docstring of a tool describes its arguments.
    is_described = re.search(r"^\s*Args:", inspect.getdoc(step) or "", re.MULTILINE)
    if step is not None and len(inspect.signature(step).parameters) > 1 and not is_described:
        return []
    tools = {n: f for n, f in methods.items() if n not in _OWN and not n.startswith("_")}
    if not tools:
        raise UserError(f"{setting} has no step, and no method that the model could call: give it one of them")
    return [described(MethodType(f, object()), f"{setting}: {n}") for n, f in tools.items()]
