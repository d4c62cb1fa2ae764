"""The tools of a run as a partner: functions in worker processes, and methods of environments."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from hybrid_grpo.config import RolloutConfig, ScoringConfig
from hybrid_grpo.config.errors import did_you_mean, refuse
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.data.batch import Numbers, Rollout
from hybrid_grpo.data.completion import Message
from hybrid_grpo.data.episodes import Observation
from hybrid_grpo.distributed.workers.calls import Call, Failure, Reply
from hybrid_grpo.distributed.workers.pool import Caller, Pool
from hybrid_grpo.turns.calls import ToolCall, Turn
from hybrid_grpo.turns.environments.environments import Environments, Kind
from hybrid_grpo.turns.observations import error_text
from hybrid_grpo.turns.template import tool_message
from hybrid_grpo.turns.tools.functions import ToolEntry
from hybrid_grpo.turns.trajectory import Answer, Seconds, Trajectory

UNKNOWN = "unknown"
"""Stands for the tool, in counts and messages, if a call names no known tool or cannot be read."""
_AT_ONCE = 8
"""Maximum number of calls of one turn that run at the same time."""


class Tools:
    """A `Partner`: the functions of `rollout.tools`, and the methods of `environments`. A completion can call all
    functions, but only the methods of its own environment.

    Up to 8 calls of a turn run at the same time. Once one of them has taken too long, no further ones are started.

    Creating it raises UserError if a function cannot be imported or described.

    Attributes:
        names: names of all tools, functions first.
        schemas: JSON schemas of all tools.
    """

    setting, reads_last = "rollout.tools", False

    def __init__(self, config: RolloutConfig, scoring: ScoringConfig, environments: Environments | None = None) -> None:
        entries = [
            (f"rollout.tools[{k}]", ToolEntry(function_text(tool.function), tool.kwargs))
            for k, tool in enumerate(config.tools)
        ]
        pool = Pool(entries, scoring)
        self._functions: list[dict[str, Any]] = [interface.schema["function"] for interface in pool.interfaces]
        names = [str(schema["function"]["name"]) for schema in self._functions]
        kinds = list(environments.kinds.values()) if environments is not None else []
        self.names = list(dict.fromkeys([*names, *(name for kind in kinds for name in kind.tool_names)]))
        self.schemas = [*self._functions, *(schema for kind in kinds for schema in kind.tools)]
        for together in [names, *([*names, *kind.tool_names] for kind in kinds)]:
            twice = [name for name in together if together.count(name) > 1]
            refuse(bool(twice), f"rollout.tools: two are named {', '.join(twice[:1])}: rename one of the functions")
        refuse(UNKNOWN in self.names, f"rollout.tools: {UNKNOWN} is the name for calls of no tool: rename the function")
        self._callers: dict[str, Caller] = {
            name: pool.isolated(index, config.tool_timeout_s) for index, name in enumerate(names)
        }
        self.shows = any(interface.schema["shows"] for interface in pool.interfaces)
        self.shows |= any(kind.shows and bool(kind.tools) for kind in kinds)
        self._environments = environments
        self._pool, self.seconds = pool, Seconds()

    def example(self, content: str | Observation) -> Message:
        return tool_message(0, self.names[0], content)

    def takes(self, trajectory: Trajectory, turn: Turn) -> bool:
        """Whether a turn calls tools, or tries to."""
        return bool(turn.calls) or turn.fault is not None

    def answer(self, trajectory: Trajectory, turn: Turn, done: Callable[[Answer], None]) -> None:
        """Answer a turn with the results of all of its calls."""
        if turn.fault is not None:
            self._count(trajectory, UNKNOWN, has_failed=True)
        _TurnCalls(self, trajectory, turn, done).go_on()

    def schemas_of(self, kind: Kind) -> list[dict[str, Any]]:
        """Return the JSON schemas for completions whose environment is of this kind."""
        return [*self._functions, *kind.tools]

    def call(self, trajectory: Trajectory, call: ToolCall, done: Callable[[Observation, Failure | None], None]) -> None:
        """Call a tool, or a method of the completion's environment. `done` is called, on any thread, with what the
        model reads, and with the failure, if the call failed."""
        caller, start_s = self._callers.get(call.name), time.perf_counter()
        environments = self._environments
        prompt = trajectory.prompt
        methods = environments.kind(prompt).tool_names if environments and prompt is not None else []

        def ended(said: Observation | None, failure: Failure | None) -> None:
            self._count(trajectory, call.name, said is None, time.perf_counter() - start_s)
            done(said or Observation(error_text(failure.message if failure else "no answer")), failure)

        def finish(future: Future[Reply]) -> None:
            reply = future.result() if not future.cancelled() else None
            failure = reply.failures[0] if reply else None
            ended(reply.values[0] if reply and failure is None else None, failure)

        if call.name in methods and environments:
            environments.call(trajectory, call, ended)
        elif caller is not None:
            caller(Call({"arguments": [call.arguments]}, [None])).add_done_callback(finish)
        else:
            self._count(trajectory, UNKNOWN, has_failed=True)
            known = [*self._callers, *methods]
            done(Observation(error_text(f"there is no tool {call.name}: {did_you_mean(call.name, known)}")), None)

    def give_up(self, trajectory: Trajectory, call: ToolCall) -> Observation:
        """Return what the model reads in place of the result of a call not started because another took too long."""
        self._count(trajectory, call.name if call.name in self.names else UNKNOWN, has_failed=True)
        return Observation(error_text("not called: another call of the turn took too long"))

    def _count(self, trajectory: Trajectory, name: str, has_failed: bool, seconds: float = 0.0) -> None:
        trajectory.calls.append((f"tool/{name}", has_failed))
        self.seconds.add(f"tool/{name}", seconds)

    def numbers(self, rollout: Rollout) -> Numbers:
        names = [f"tool/{name}" for name in (*self.names, UNKNOWN)]
        numbers = self.seconds.numbers(names)
        for name in names:
            failed = [has_failed for c in rollout.completions for called, has_failed in c.calls if called == name]
            calls = len(failed)
            numbers |= {f"{name}/calls": (calls, 1), f"{name}/failed_frac": (sum(failed) / max(calls, 1), calls)}
        return numbers


class _TurnCalls:
    """The calls of one turn while they run."""

    def __init__(self, tools: Tools, trajectory: Trajectory, turn: Turn, done: Callable[[Answer], None]) -> None:
        self._tools, self._trajectory, self._fault, self._done = tools, trajectory, turn.fault, done
        self._calls = turn.calls
        self._waiting = deque(range(len(turn.calls)))
        self._results: dict[int, Observation] = {}
        self._running = 0
        self._lock, self._is_starting = threading.Lock(), False

    def go_on(self) -> None:
        """Start as many calls as may run, and answer the turn once all have ended."""
        while True:
            with self._lock:
                if self._is_starting:
                    return  # another thread, or a caller further up the stack, is starting calls and continues
                if len(self._results) == len(self._calls):
                    self._is_starting = True  # for good
                    break
                if not self._waiting or self._running == _AT_ONCE:
                    return
                self._is_starting, number = True, self._waiting.popleft()
                self._running += 1
            self._tools.call(self._trajectory, self._calls[number], partial(self._take, number))
            with self._lock:
                self._is_starting = False
        self._done(Answer(self._messages()))

    def _take(self, number: int, said: Observation, failure: Failure | None) -> None:
        with self._lock:
            self._running -= 1
            self._results[number] = said
            if failure is not None and failure.kind == "timeout":
                self._results |= {k: self._tools.give_up(self._trajectory, self._calls[k]) for k in self._waiting}
                self._waiting.clear()
        self.go_on()

    def _messages(self) -> list[Message]:
        # A name that the model has made up may be of any length.
        known = [(call, call.name if call.name in self._tools.names else UNKNOWN) for call in self._calls]
        messages = [tool_message(k, name, self._results[k], call.id) for k, (call, name) in enumerate(known)]
        if self._fault is not None:
            messages.append(tool_message(len(messages), UNKNOWN, error_text(self._fault)))
        return messages
