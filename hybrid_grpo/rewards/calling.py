"""Calling reward functions in the background, while this thread goes on.

Plain functions run one after the other in one thread. The coroutines of `async def` functions run in the event loop
of another, so that those of later calls wait for their services at the same time. Both threads live as long as the
`Background` does: what a function keeps from call to call (a connection, a client bound to its loop) stays usable.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_grpo.rewards.loading import Reward

Inputs = dict[str, list[Any]]
"""By name, each with one element per row."""


@dataclass(frozen=True)
class Outcome:
    """What a call came to."""

    results: list[Any]
    """What each function returned, or the exception that it raised."""
    start_s: float
    end_s: float
    """By `time.perf_counter`."""


class Pending:
    """A call of some functions with the same inputs, waiting or running or done."""

    def __init__(self, plain: Future[Future[Outcome]]) -> None:
        self._plain = plain

    def outcome(self) -> Outcome:
        """Wait for it."""
        return self._plain.result().result()

    def cancel(self) -> None:
        """Do not begin; what has begun goes on to its end."""
        self._plain.cancel()


class Background:
    """The two threads. Both start in torch's default modes, and on the GPU that is current here and now."""

    def __init__(self) -> None:
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._plain = ThreadPoolExecutor(1, "rewards", initializer=_enter, initargs=(gpu,))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_serve, args=(self._loop, gpu), name="rewards-async", daemon=True).start()
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    def call(self, rewards: list[Reward], inputs: Inputs) -> Pending:
        """Call every function with the inputs, after the calls before; nothing is waited for, or raised, here."""
        return Pending(self._plain.submit(_begin, rewards, inputs, self._loop))


def busy_seconds(outcomes: Iterable[Outcome]) -> float:
    """Seconds in which at least one of the calls ran: coroutines of several calls overlap."""
    total, until = 0.0, float("-inf")
    for outcome in sorted(outcomes, key=lambda outcome: outcome.start_s):
        total += max(0.0, outcome.end_s - max(outcome.start_s, until))
        until = max(until, outcome.end_s)
    return total


def _enter(gpu: int | None) -> None:
    # The current GPU belongs to a thread: a new one would put every rank's reward models on the first.
    if gpu is not None:
        torch.cuda.set_device(gpu)


def _serve(loop: asyncio.AbstractEventLoop, gpu: int | None) -> None:
    _enter(gpu)
    stopped = False
    while not stopped:
        # Of a task that a function started: asyncio hands it to the function, but also ends the loop.
        with suppress(SystemExit):
            loop.run_forever()
            stopped = True
    loop.close()


def _begin(rewards: list[Reward], inputs: Inputs, loop: asyncio.AbstractEventLoop) -> Future[Outcome]:
    start_s = time.perf_counter()
    results = [_call(reward, inputs) for reward in rewards]
    if any(map(inspect.isawaitable, results)):
        return asyncio.run_coroutine_threadsafe(_settled(results, start_s), loop)
    done: Future[Outcome] = Future()
    done.set_result(Outcome(results, start_s, time.perf_counter()))
    return done


def _call(reward: Reward, inputs: Inputs) -> Any:
    try:
        return reward(inputs)
    except BaseException as error:  # nothing stands above it in this thread
        return error


async def _settled(results: list[Any], start_s: float) -> Outcome:
    async def settle(result: Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except SystemExit as error:
            return error

    values = await asyncio.gather(*map(settle, results), return_exceptions=True)
    return Outcome(values, start_s, time.perf_counter())
