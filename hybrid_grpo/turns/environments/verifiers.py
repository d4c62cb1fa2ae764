"""Environments of the package `verifiers`, in its classic form: `load_environment` returns a `vf.Environment`.

Such an environment runs a completion by itself and requests turns from a model server. Here its own loop runs in the
worker process, and the policy writes the turns; its stop conditions, answers and rubric are used as they are. Tools of
the environment, and conversations that rewrite their history, are refused.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hybrid_grpo.config.errors import UserError

PACKAGE = "verifiers"
"""`verifiers:NAME` is an installed environment."""


def installed(package: Any, name: str, setting: str) -> Callable[[], Any]:
    """Return a factory of an installed environment. Raises UserError if the package is too new for this form."""
    load = getattr(package, "load_environment", None)
    if load is None:
        raise UserError(
            f"{setting}: this version of verifiers has no load_environment: install 'verifiers>=0.3.1,<0.4'"
        )
    return lambda: load(name)


def quietly(make: Callable[[], Any]) -> Any:
    """Call `make` and return its result; restores the signal handlers, which environments of verifiers replace."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    made = make()
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    return made


def is_foreign(made: Any) -> bool:
    """Whether an object is an environment of verifiers."""
    kinds = inspect.getmro(type(made))
    return any(kind.__module__.startswith(f"{PACKAGE}.") and kind.__name__ == "Environment" for kind in kinds)


@dataclass(frozen=True)
class Scores:
    """The metrics of the rubric for one completion."""

    metrics: dict[str, float]
    """Values of the metrics, keyed by the names of the rubric's functions."""


class VerifiersRollout:
    """One completion of an environment of verifiers, as an environment whose turns are steps.

    Args:
        environment: shared by all completions of a process; verifiers keeps a separate state for each.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._rollout: asyncio.Task[Any] | None = None
        self._asked: asyncio.Future[list[Any]] | None = None
        self._turn: asyncio.Future[Any] | None = None
        self._read: list[Any] = []
        self._metrics: dict[str, float] = {}

    async def reset(self, prompt: Any, **columns: Any) -> None:
        """Start the rollout of a row of the environment's dataset, up to the first turn."""
        row = {"example_id": 0, **columns, "prompt": prompt}
        self._rollout = asyncio.create_task(
            self._environment.run_rollout(row, _client(self._next_turn), "policy", {}, state_columns=[])
        )
        await self._wait()

    async def step(self, text: str) -> tuple[str, None, bool]:
        """Give the rollout a turn; returns its answer, no reward, and whether the rollout is complete."""
        from verifiers.types import Response, ResponseMessage

        assert self._rollout is not None
        if self._rollout.done():
            return "", None, True
        assert self._turn is not None
        read = self._read
        message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
        self._turn.set_result(Response(id="", created=0, model="policy", message=message))
        await self._wait()
        if self._rollout.done():
            return "", None, True
        kept, turn, said = self._read[: len(read)], self._read[len(read)], self._read[len(read) + 1 :]
        if kept != read or turn.role != "assistant" or turn.content != text:
            raise ValueError("rewrote the conversation: only environments that add to it can be trained with")
        if not said or any(message.role != "user" or not isinstance(message.content, str) for message in said):
            raise ValueError("answered with something other than text messages of the user")
        return "\n\n".join(message.content for message in said), None, False

    async def get_reward(self) -> float:
        """Return the rubric's reward. A completion that was cut ends in the way that verifiers ends overlong ones."""
        from verifiers.errors import OverlongPromptError

        assert self._rollout is not None
        if not self._rollout.done():
            assert self._turn is not None
            self._turn.set_exception(OverlongPromptError("the completion was cut"))
        output = await self._rollout
        if output["error"]:
            raise RuntimeError(f"the rollout failed: {output['error']}")
        self._metrics = dict(output["metrics"])
        return float(output["reward"])

    def carried(self) -> Scores:
        """Return the object that reward functions receive as the environment of the completion."""
        return Scores(self._metrics)

    async def close(self) -> None:
        """Cancel a rollout that is under way."""
        if self._rollout is not None:
            self._rollout.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._rollout

    async def _next_turn(self, messages: Sequence[Any]) -> Any:
        """Stands in for a model server: returns the model's next turn in the conversation so far."""
        assert self._asked is not None
        self._turn = asyncio.get_running_loop().create_future()
        self._asked.set_result(list(messages))
        return await self._turn

    async def _wait(self) -> None:
        """Wait until the rollout requests a turn, or is complete."""
        assert self._rollout is not None
        self._asked = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        if self._asked.done():
            self._read = self._asked.result()
        else:
            self._rollout.result()  # raises what the rollout raised


def rollouts_of(environment: Any, setting: str) -> Callable[[], VerifiersRollout]:
    """Return a factory of completions of an environment. Raises UserError if the environment has tools."""
    if getattr(environment, "tool_defs", None):
        raise UserError(
            f"{setting}: an environment of verifiers with tools cannot be run: give its tools as rollout.tools, and its"
            " rewards as rewards"
        )
    return lambda: VerifiersRollout(environment)


def _client(next_turn: Callable[[Sequence[Any]], Any]) -> Any:
    """Return a client of verifiers that requests turns from `next_turn`, not from a server."""
    from verifiers.clients import Client

    class Policy(Client):
        async def get_response(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            return await next_turn(prompt)

    Policy.__abstractmethods__ = frozenset()  # `get_response` needs the other methods only with a server
    return Policy(None)
