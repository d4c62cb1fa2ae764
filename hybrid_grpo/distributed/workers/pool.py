"""Calls other people's code with time limits, in one of four ways.

    call_inline    in the calling thread: for functions that are fast and cannot hang, or that all ranks call together
    Threads        in a thread of the rank, one call at a time: for functions that hold a GPU
    Workers        in worker processes, as many calls at the same time as there are processes
    Tasks          in one worker process or several, many calls at the same time: for `async def` functions

A call that takes too long is given up: a worker is killed, with all that it has started, and replaced; a thread is
abandoned. The Pool's event loop drives all calls but inline ones in its own thread; a rank only waits for results.
"""

import asyncio
import copy
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from hybrid_grpo.config import ScoringConfig
from hybrid_grpo.config.user_code import describe
from hybrid_grpo.distributed.ranks import own_cores
from hybrid_grpo.distributed.workers import calls
from hybrid_grpo.distributed.workers.leased_processes import Leases
from hybrid_grpo.distributed.workers.processes import ForkServer, Worker

_ASYNC_CALLS = 64
_ASYNC_GRACE_SECONDS = 2.0  # a worker cancels slow coroutines itself, unless one of them blocks its event loop

Caller = Callable[[calls.Call], "Future[calls.Reply]"]
"""A way to call a callee. It returns a future at once and never raises; only `call_inline` waits and may raise."""
Ask = Callable[[calls.Call], Coroutine[Any, Any, calls.Reply]]


class Pool:
    """The event loop that drives calls, and the worker processes of entries. Raises UserError like `ForkServer`.

    Args:
        entries: what runs in worker processes; each entry comes with its name for messages.
        scoring: the limits of each process, and the number of processes for callees that are not async.
    """

    def __init__(self, entries: Sequence[tuple[str, calls.Entry]], scoring: ScoringConfig) -> None:
        self._fork_server = ForkServer(entries, scoring) if entries else None
        self.interfaces = self._fork_server.interfaces if self._fork_server else []
        self.hidden = self._fork_server.hidden if self._fork_server else []
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(self._loop, self._fork_server), name="workers", daemon=True)
        thread.start()
        self._count = scoring.workers or worker_count()
        self._workers = Workers(self._fork_server, self._count) if self._fork_server else None
        self._finalizer = weakref.finalize(self, _close, self._loop, thread)

    def isolated(self, index: int, timeout_s: float, *, spread: bool = False) -> Caller:
        """Return a caller that calls the entry with this index in worker processes. An `async def` function has one, or
        with `spread` as many as other functions."""
        assert self._fork_server is not None and self._workers is not None
        interface = self.interfaces[index]
        workers: Workers | Tasks = self._workers
        if interface.is_async:
            workers = Tasks(self._fork_server, self._workers, self._count if spread else 1)
        return partial(self._start, partial(workers.ask, index, timeout_s), interface.batch_size != "group")

    def leases(self, timeout_s: float, most: int | None = None) -> Leases:
        assert self._fork_server is not None
        return Leases(self._fork_server, self._loop, timeout_s, most)

    def threaded(self, function: calls.Callee, timeout_s: float, enter: Callable[[], None]) -> Caller:
        """Return a caller that calls a callee in threads of this process; every thread first calls `enter`."""
        ask = partial(Threads(enter).ask, function, timeout_s)
        return partial(self._start, ask, function.interface.batch_size != "group")

    def _start(self, ask: Ask, splits: bool, call: calls.Call) -> Future[calls.Reply]:
        # The coroutine holds no reference to the pool, which thus ends even if calls are under way.
        return asyncio.run_coroutine_threadsafe(_replied(ask, splits, call), self._loop)

    def close(self) -> None:
        """End the loop and all processes. This also happens when the pool is garbage-collected."""
        self._finalizer()


def worker_count() -> int:
    """Return the number of workers of this rank: one per available core, but at least 2 and at most 8."""
    return min(8, max(2, own_cores()))


async def _replied(ask: Ask, splits: bool, call: calls.Call) -> calls.Reply:
    """Return the reply to a call. If `splits` is true, a call that fails as a whole is repeated row by row."""

    async def timed(part: calls.Call) -> calls.Reply:
        start_s = time.perf_counter()
        try:
            reply = await ask(part)
        except Exception as error:  # such as inputs that cannot be pickled
            reply = calls.failed(
                calls.Failure("invalid", f"could not be called: {describe(error, None)}"), len(part.expected)
            )
        return replace(reply, spans=[(start_s, time.perf_counter())])

    reply = await timed(call)
    if reply.whole and splits:
        parts = calls.joined(await asyncio.gather(*map(timed, calls.single_rows(call))))
        reply = replace(parts, spans=reply.spans + parts.spans)
    return reply


class Workers:
    """Processes that take one call at a time; each is started by a call that finds none free. Each process calls only
    one function, so what a function does to its process does not affect other functions."""

    def __init__(self, fork_server: ForkServer, count: int) -> None:
        self._fork_server = fork_server
        self._count = count
        self._slots = asyncio.Semaphore(count)
        self._alone = asyncio.Lock()
        self._idle: defaultdict[int, list[Worker]] = defaultdict(list)
        """Idle workers by the index of their function."""

    async def ask(self, index: int, timeout_s: float, call: calls.Call) -> calls.Reply:
        """Call the entry with this index; `timeout_s` counts from the moment at which a process is free."""
        async with self._slots:
            reply = await self._ask(index, timeout_s, call)
        if reply is None:
            # The fork server was killed, and every worker with it. Repeat calls one by one, to find the cause.
            async with self._alone, AsyncExitStack() as slots:
                for _ in range(self._count):
                    await slots.enter_async_context(self._slots)
                reply = await self._ask(index, timeout_s, call)
        return reply or calls.died(None, len(call.expected))

    async def _ask(self, index: int, timeout_s: float, call: calls.Call) -> calls.Reply | None:
        """Call once and return the reply; None if the fork server has died together with the worker."""
        rows = len(call.expected)
        worker = self._free(index)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await worker.ask(index, call, timeout_s)
        except TimeoutError:
            worker.end()
            return calls.timed_out(timeout_s, rows)
        except EOFError:
            status = worker.end()
            return None if status is None else calls.died(status, rows)
        except BaseException:
            worker.end()
            raise
        if reply.spent:
            worker.end()
        else:
            self._idle[index].append(worker)
        return reply

    def _free(self, index: int) -> Worker:
        while self._idle[index]:
            worker = self._idle[index].pop()
            if not worker.is_gone:
                return worker
            worker.end()
        return Worker(self._fork_server, asyncio.get_running_loop(), "sync")


class Tasks:
    """Processes that each run many calls of an `async def` function at the same time. If one dies or its event loop is
    blocked, each of its calls is repeated in a process of its own, so that one call cannot spoil the others."""

    def __init__(self, fork_server: ForkServer, workers: Workers, count: int) -> None:
        self._fork_server = fork_server
        self._workers = workers
        self._slots = asyncio.Semaphore(_ASYNC_CALLS * count)
        self._processes: list[Worker | None] = [None] * count
        self._calls = [0] * count

    async def ask(self, index: int, timeout_s: float, call: calls.Call) -> calls.Reply:
        """Call the function; `timeout_s` counts from the moment at which a process has fewer than 64 other calls."""
        async with self._slots:
            place = self._calls.index(min(self._calls))
            self._calls[place] += 1
            try:
                reply = await self._ask(place, index, timeout_s, call)
            finally:
                self._calls[place] -= 1
        return reply or await self._workers.ask(index, timeout_s, call)

    async def _ask(self, place: int, index: int, timeout_s: float, call: calls.Call) -> calls.Reply | None:
        """Call once and return the reply; None if the process is lost, and with it all of its calls."""
        worker = self._processes[place] or Worker(self._fork_server, asyncio.get_running_loop(), "async")
        self._processes[place] = worker
        try:
            async with asyncio.timeout(timeout_s + _ASYNC_GRACE_SECONDS):
                reply = await worker.ask(index, call, timeout_s)
        except (TimeoutError, EOFError):
            self._lose(place, worker)
            return None
        if reply.spent:
            self._lose(place, worker)
        return reply

    def _lose(self, place: int, worker: Worker) -> None:
        if worker is self._processes[place]:
            self._processes[place] = None
            worker.end()


class Threads:
    """Runs each call of one function in a new thread, one call at a time; a thread that takes too long is abandoned."""

    def __init__(self, enter: Callable[[], None]) -> None:
        self._enter = enter
        self._turn = asyncio.Lock()

    async def ask(self, function: calls.Callee, timeout_s: float, call: calls.Call) -> calls.Reply:
        """Call the function; `timeout_s` counts from the moment at which the previous call is over."""
        async with self._turn:
            answer: Future[calls.Reply] = Future()
            threading.Thread(target=self._run, args=(answer, function, call), name="callee", daemon=True).start()
            try:
                async with asyncio.timeout(timeout_s):
                    return await asyncio.wrap_future(answer)
            except TimeoutError:
                return calls.timed_out(timeout_s, len(call.expected))

    def _run(self, answer: Future[calls.Reply], function: calls.Callee, call: calls.Call) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            self._enter()
            answer.set_result(function.reply(copy.deepcopy(call)))  # the function may change its arguments
        except Exception as error:  # arguments that cannot be copied
            answer.set_exception(error)


def _serve(loop: asyncio.AbstractEventLoop, fork_server: ForkServer | None) -> None:
    loop.run_forever()
    if fork_server is not None:
        fork_server.close()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def _close(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    with suppress(RuntimeError):  # the loop is closed already
        loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(timeout=5)
