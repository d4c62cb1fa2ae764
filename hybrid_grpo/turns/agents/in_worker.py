"""Runs agents in worker processes: a function with a client of the endpoint, or a program that finds it in its
environment."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import secrets
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybrid_grpo.config.errors import UserError, type_of
from hybrid_grpo.config.user_code import describe, import_object
from hybrid_grpo.distributed.workers.calls import Call, Failure, Interface, Reply, failed, finite, raised
from hybrid_grpo.turns.observations import shows_pictures

_LAST = 500
"""Characters of what a failed program wrote last that are reported."""


@dataclass(frozen=True)
class AgentEntry:
    """`rollout.agent`, as passed to worker processes."""

    agent: str
    """`path/to/file.py:function`, `package.module:function`, or a command line."""

    def load(self, name: str) -> Agent:
        """Find the function of the entry. Raises UserError if there is none, or if it cannot be called."""
        if " " in self.agent:  # a command line
            return Agent(partial(_run, shlex.split(self.agent)), Interface([], None, True, 1), has_client=False)
        setting = f"{name} {self.agent}"
        function = import_object(self.agent, setting)
        try:
            inspect.signature(function).bind({}, None)
        except (TypeError, ValueError) as error:
            raise UserError(f"{setting} is called with a task and a client: {error}") from error
        try:
            import openai  # noqa: F401 every worker has it
        except ImportError as error:
            raise UserError(f"{name} needs openai's client: pip install 'hybrid-grpo[agents]' ({error})") from error
        is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        return Agent(function, Interface([], None, is_async, 1, schema={"shows": shows_pictures(function)}))

    def checked(self, value: Any, expected: None) -> float | dict[str, float] | None:
        """Return the reward of an episode, or those of its roles or replies; None if the agent gives none."""
        if value is not None and any(finite(each) is None for each in _each(value)):
            raise ValueError(value)
        return value


@dataclass
class Agent:
    """A `Callee` whose calls are episodes."""

    function: Callable[[dict[str, Any], Any], Any]
    """Called with a task and a client, or for a program with a task and its environment."""
    interface: Interface
    has_client: bool = True
    _client: Any = None
    """Keeps the connections of all episodes of this process."""

    def reply(self, call: Call) -> Reply:
        try:
            if self.interface.is_async:
                self._client = None  # its connections belong to the event loop of an earlier call
            result = self.function(*self._inputs(call))
            return _replied(asyncio.run(result) if inspect.iscoroutine(result) else result)
        except BaseException as error:  # including SystemExit, which must not end the process
            return raised(error, f"raised {describe(error, None)}", 1)

    async def reply_async(self, call: Call) -> Reply:
        try:
            return _replied(await self.function(*self._inputs(call)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return raised(error, f"raised {describe(error, None)}", 1)

    def _inputs(self, call: Call) -> tuple[dict[str, Any], Any]:
        task, url, key = (call.inputs[name][0] for name in ("task", "url", "key"))
        # An episode may be begun again, in another process: what was asked before then does not count.
        key = f"{key}.{secrets.token_hex(4)}"
        if not self.has_client:
            return task, {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": "policy"}
        if self._client is None:
            import openai

            kind = openai.AsyncOpenAI if self.interface.is_async else openai.OpenAI
            more: dict[str, Any] = {}
            with suppress(AttributeError, RuntimeError):  # without aiohttp, which takes half of httpx's time
                more = {"http_client": openai.DefaultAioHttpClient(timeout=None)} if self.interface.is_async else {}
            self._client = kind(base_url=url, api_key=key, max_retries=0, timeout=None, **more)
        return task, self._client.with_options(api_key=key)


def _each(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else [value]


def _replied(result: Any) -> Reply:
    if any(finite(each) is None for each in _each(result)) and result is not None:
        why = f"returned {type_of(result)}: return a finite number, a dict of these, or None"
        return failed(Failure("invalid", why), 1)
    if isinstance(result, dict):
        return Reply([{str(name): float(reward) for name, reward in result.items()}], [None])
    return Reply([None if result is None else float(result)], [None])


async def _run(command: list[str], task: dict[str, Any], variables: dict[str, str]) -> Any:
    """Run a program, with the task as JSON on its standard input. Its reward is the last line that it writes, if that
    is JSON: a number or an object. Raises RuntimeError if it fails."""
    program = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **variables},
    )  # fmt: skip
    try:
        out, err = await program.communicate(json.dumps(task, default=str).encode())
    except asyncio.CancelledError:
        program.kill()
        raise
    if program.returncode:
        said = err.decode(errors="replace").strip()[-_LAST:]
        raise RuntimeError(f"the program ended with status {program.returncode}: {said}")
    last = out.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        return json.loads(last)
    except ValueError:
        if last:
            print(last, file=sys.stderr, flush=True)
        return None
