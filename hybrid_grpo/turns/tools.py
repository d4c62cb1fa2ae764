"""The tools of a run: their functions in worker processes, and how often each was called."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybrid_grpo.config import RolloutConfig, ScoringConfig
from hybrid_grpo.config.errors import did_you_mean, refuse
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.data.batch import Message, Numbers
from hybrid_grpo.rewards.functions import Reply, RewardCall
from hybrid_grpo.rewards.loading import worker_count
from hybrid_grpo.rewards.workers.pool import Caller, Pool
from hybrid_grpo.rewards.workers.tools import RESULT, ToolEntry
from hybrid_grpo.turns.calls import Call, Turn
from hybrid_grpo.turns.conversation import Answer, Conversation
from hybrid_grpo.turns.template import tool_message

UNKNOWN = "unknown"
"""Stands for the tool in counts where a call names none, or cannot be read."""


@dataclass
class Counts:
    """What happened since the last look, over all conversations of a rank."""

    calls: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))


class Tools:
    """The functions of `rollout.tools`, each in worker processes, as reward functions are; has the form of `Partner`.

    All calls of a turn run at the same time.

    Creating it raises UserError where one cannot be imported or described.

    Attributes:
        names: of the tools, in the order of the configuration.
        schemas: what the model is told of them.
    """

    setting, reads_last = "rollout.tools", False

    def __init__(self, config: RolloutConfig, scoring: ScoringConfig) -> None:
        entries = [
            (f"rollout.tools[{k}]", ToolEntry(function_text(tool.function), tool.kwargs))
            for k, tool in enumerate(config.tools)
        ]
        pool = Pool(entries, scoring.workers or worker_count(), scoring)
        self.schemas: list[dict[str, Any]] = [interface.schema or {} for interface in pool.interfaces]
        self.names = [str(schema["function"]["name"]) for schema in self.schemas]
        twice = [name for name in self.names if self.names.count(name) > 1]
        refuse(bool(twice), f"rollout.tools: two are named {', '.join(twice[:1])}: rename one of the functions")
        refuse(UNKNOWN in self.names, f"rollout.tools: {UNKNOWN} is the name for calls of no tool: rename the function")
        self._callers: dict[str, Caller] = {
            name: pool.isolated(index, config.tool_timeout_s) for index, name in enumerate(self.names)
        }
        self._pool, self._counts, self._lock = pool, Counts(), threading.Lock()

    def example(self, content: str) -> Message:
        """See `Partner`."""
        return tool_message(0, self.names[0], content)

    def takes(self, conversation: Conversation, turn: Turn) -> bool:
        """Whether a turn calls tools, or tries to."""
        return bool(turn.calls) or turn.fault is not None

    def answer(self, conversation: Conversation, turn: Turn, done: Callable[[Answer], None]) -> None:
        """Answer a turn with the results of all of its calls, once they are there."""
        calls = turn.calls if turn.fault is None else [*turn.calls, Call(UNKNOWN, {})]
        results: dict[int, str] = {}
        lock = threading.Lock()

        def take(number: int, text: str) -> None:
            with lock:
                results[number] = text
                if len(results) < len(calls):
                    return
            done(Answer([tool_message(k, call.name, results[k]) for k, call in enumerate(calls)]))

        if turn.fault is not None:
            self._count(UNKNOWN, True, 0.0)
            take(len(turn.calls), f"error: {turn.fault}")
        for number, call in enumerate(turn.calls):
            self.call(call, partial(take, number))

    def call(self, call: Call, done: Callable[[str], None]) -> None:
        """Call a tool; `done` is told what the model reads of it, in whatever thread."""
        caller, start_s = self._callers.get(call.name), time.perf_counter()
        if caller is None:
            self._count(UNKNOWN, True, 0.0)
            done(f"error: there is no tool {call.name}: {did_you_mean(call.name, self.names)}")
            return

        def finish(future: Future[Reply]) -> None:
            reply = future.result() if not future.cancelled() else None
            failure = reply.failures[0] if reply else None
            text = reply.extra[RESULT][0] if reply and failure is None else None
            ok = isinstance(text, str)
            self._count(call.name, not ok, time.perf_counter() - start_s)
            done(text if isinstance(text, str) else f"error: {failure.message if failure else 'no answer'}")

        caller(RewardCall({"arguments": [call.arguments]}, [0])).add_done_callback(finish)

    def _count(self, name: str, has_failed: bool, seconds: float) -> None:
        with self._lock:
            self._counts.calls[name] += 1
            self._counts.failed[name] += has_failed
            self._counts.seconds[name] += seconds

    def numbers(self) -> Numbers:
        """What was called since the last call of this, by metric."""
        with self._lock:
            counts, self._counts = self._counts, Counts()
        numbers: Numbers = {}
        for name in [*self.names, UNKNOWN]:
            calls = counts.calls[name]
            numbers[f"tool/{name}/calls"] = calls, 1
            numbers[f"tool/{name}/failed_frac"] = counts.failed[name] / max(calls, 1), calls
            numbers[f"tool/{name}/seconds"] = counts.seconds[name] / max(calls, 1), calls
        return numbers


def tool_names(tools: Sequence[str]) -> list[str]:
    """Names under which tools are counted."""
    return [*tools, UNKNOWN] if tools else []
