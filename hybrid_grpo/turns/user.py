"""A function that plays the user: it answers the model's turns, in worker processes."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from hybrid_grpo.config import RolloutConfig, ScoringConfig
from hybrid_grpo.config.errors import did_you_mean, refuse, type_of
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.config.user_code import import_object
from hybrid_grpo.data.batch import Numbers, Rollout
from hybrid_grpo.data.completion import Message, Prompt
from hybrid_grpo.data.episodes import Observation
from hybrid_grpo.distributed.workers.calls import Call, Failure, Interface, Reply, failed
from hybrid_grpo.distributed.workers.pool import Pool
from hybrid_grpo.turns.calls import Turn
from hybrid_grpo.turns.observations import SHOWS, received, shows_pictures
from hybrid_grpo.turns.template import user_message
from hybrid_grpo.turns.tools.functions import Tool, ToolEntry
from hybrid_grpo.turns.trajectory import Answer, Seconds, Trajectory, call_numbers

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


@dataclass(frozen=True)
class _Pending:
    """A turn that waits for the user's answer."""

    trajectory: Trajectory
    done: Callable[[Answer], None]
    start_s: float = field(default_factory=time.perf_counter)


class User:
    """The `Partner` that plays the user. If it fails, the conversation ends. Raises UserError if the function cannot be
    imported or called."""

    setting, reads_last = "rollout.user", False

    def __init__(self, config: RolloutConfig, scoring: ScoringConfig) -> None:
        assert config.user is not None
        self._name, self._stops = function_text(config.user), config.user_stop
        self._pool = Pool([(self.setting, UserEntry(self._name))], scoring)
        self._call = self._pool.isolated(0, config.tool_timeout_s)
        self.shows = self._pool.interfaces[0].schema["shows"]
        self.seconds = Seconds()
        self._printed: set[str] = set()
        """Kinds of failures that have been printed."""

    def example(self, content: str | Observation) -> Message:
        return user_message(content)

    def takes(self, trajectory: Trajectory, turn: Turn) -> bool:
        """Whether another turn may follow; after the last turn allowed the conversation is over. True also if only the
        limit of tokens prevents another turn, so that the completion counts as cut."""
        return not trajectory.is_last or trajectory.is_full

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raise UserError if the rows lack a column that is needed."""
        for name in self._pool.interfaces[0].required:
            refuse(
                name not in columns,
                f"rollout.user {self._name} needs a column {name}, which the data does not have:"
                f" {did_you_mean(name, columns)}",
            )

    def answer(self, trajectory: Trajectory, turn: Turn, done: Callable[[Answer], None]) -> None:
        """See `Partner`."""
        pending = _Pending(trajectory, done)

        def finish(future: Future[Reply]) -> None:
            reply = failed(Failure("died", "did not answer"), 1) if future.cancelled() else future.result()
            failure = reply.failures[0]
            if failure is not None:
                self._failed(pending, failure)
            else:
                self._said(pending, reply.values[0])

        given = {**_columns(trajectory), MESSAGES: _messages(trajectory)}
        self._call(Call({"arguments": [given]}, [None])).add_done_callback(finish)

    def _said(self, turn: _Pending, said: Observation | None) -> None:
        self._count(turn, has_failed=False)
        if said is None or not said.text.strip() or any(stop in said.text for stop in self._stops):
            turn.done(Answer())
        else:
            turn.done(Answer([user_message(said)]))

    def _failed(self, turn: _Pending, failure: Failure) -> None:
        """End the conversation; the first failure of each kind is printed."""
        self._count(turn, has_failed=True)
        if failure.kind not in self._printed:
            self._printed.add(failure.kind)
            print(
                f"{self.setting} failed: {failure.message}. The conversation ends there, and the failure is counted\n"
                f"{failure.traceback}",
                file=sys.stderr,
                flush=True,
            )
        turn.done(Answer())

    def _count(self, turn: _Pending, *, has_failed: bool) -> None:
        turn.trajectory.calls.append(("user", has_failed))
        self.seconds.add("user", time.perf_counter() - turn.start_s)

    def numbers(self, rollout: Rollout) -> Numbers:
        return self.seconds.numbers(["user"]) | call_numbers("user", rollout.completions)


def _messages(trajectory: Trajectory) -> list[Message]:
    """Return the conversation, including its prompt."""
    prompt: Prompt | None = trajectory.prompt
    text = [] if prompt is None else prompt.text
    return [*([user_message(text)] if isinstance(text, str) else text), *trajectory.messages]


def _columns(trajectory: Trajectory) -> dict[str, Any]:
    return {} if trajectory.prompt is None else trajectory.prompt.columns
