"""Calling reward functions without ever waiting for them longer than they may take.

    InlineCaller    here and now: built-ins that are fast and cannot hang
    CollectiveCaller  here and now, by all ranks at the same time: models that are sharded over them
    Threads   in a thread of the rank, one call at a time: functions that hold a GPU
    Workers   in processes, as many calls at the same time as there are processes
    Tasks     `async def` functions: in one process, many calls at the same time

A call that takes too long is given up: its process is killed with what it has started and replaced, its thread is left
to itself. All of it is driven by an event loop in a thread of its own, the Pool's; a rank only ever waits for results.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.config.importing import describe
from hybrid_grpo.rewards.functions import Failure, Function, Reply, RewardCall, failed
from hybrid_grpo.rewards.workers.processes import ForkServer, Worker
from hybrid_grpo.rewards.workers.worker import timed_out

_ASYNC_CALLS = 64
_ASYNC_GRACE_SECONDS = 2.0  # a worker gives up its tasks itself; one whose loop is blocked cannot


@dataclass(frozen=True)
class Outcome:
    """What a call came to."""

    reply: Reply
    spans: list[tuple[float, float]]
    """When functions ran, by `time.perf_counter`."""


class Caller(Protocol):
    """One way to call a function."""

    def start(self, request: RewardCall) -> Future[Outcome]:
        """Call it; nothing is waited for or raised here."""
        ...


class InlineCaller:
    """Calls at once, in the thread that asks."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def start(self, request: RewardCall) -> Future[Outcome]:
        start_s = time.perf_counter()
        reply = self._function.score(request)
        spans = [(start_s, time.perf_counter())]
        if reply.whole:
            reply = joined([self._function.score(request.rows([row])) for row in range(len(request.lengths))])
        done: Future[Outcome] = Future()
        done.set_result(Outcome(reply, spans))
        return done


class CollectiveCaller:
    """Calls at once, with all completions of the rank, of which there may be none: every rank has to call as often.

    It is given up for nothing, and what it raises ends the run: other ranks wait for this one.
    """

    def __init__(self, score: Callable[[RewardCall], Reply]) -> None:
        self._score = score

    def start(self, request: RewardCall) -> Future[Outcome]:
        start_s = time.perf_counter()
        reply = self._score(request)
        done: Future[Outcome] = Future()
        done.set_result(Outcome(reply, [(start_s, time.perf_counter())]))
        return done


Call = Callable[[RewardCall], Coroutine[Any, Any, Reply]]


class Pool:
    """The event loop, and the processes of the functions that are isolated.

    Args:
        entries: of `rewards`, by their names in messages: those that are isolated.
        workers: processes for functions that are not `async def`.
        memory_bytes: that a process may allocate.

    Raises:
        UserError: a function cannot be imported, or its settings do not fit.
    """

    def __init__(self, entries: list[tuple[str, RewardConfig]], workers: int, memory_bytes: int) -> None:
        self._fork_server = ForkServer(entries, memory_bytes) if entries else None
        self.interfaces = self._fork_server.interfaces if self._fork_server else []
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_serve, args=(self._loop, self._fork_server), name="rewards", daemon=True)
        thread.start()
        self._workers = Workers(self._fork_server, workers) if self._fork_server else None
        self._finalizer = weakref.finalize(self, _close, self._loop, thread)

    def isolated(self, index: int, timeout_s: float) -> Caller:
        """The caller of the isolated function with this index."""
        assert self._fork_server is not None and self._workers is not None
        interface = self.interfaces[index]
        calls: Workers | Tasks = Tasks(self._fork_server, self._workers) if interface.is_async else self._workers

        async def call(request: RewardCall) -> Reply:
            return await calls.call(index, request, timeout_s)

        return _Looped(self, call, splits=interface.batch_size != "group")

    def threaded(self, function: Function, timeout_s: float, enter: Callable[[], None]) -> Caller:
        """The caller of a function of this process; `enter` is called first in its thread."""
        threads = Threads(enter)

        async def call(request: RewardCall) -> Reply:
            return await threads.call(function, request, timeout_s)

        return _Looped(self, call, splits=function.interface.batch_size != "group")

    def run(self, coroutine: Coroutine[Any, Any, Outcome]) -> Future[Outcome]:
        """Start a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """End the loop and all processes. Also happens by itself when the pool is no longer used."""
        self._finalizer()


def busy_seconds(outcomes: Iterable[Outcome]) -> float:
    """Seconds in which at least one call ran: calls overlap."""
    total, until = 0.0, float("-inf")
    for start_s, end_s in sorted(span for outcome in outcomes for span in outcome.spans):
        total += max(0.0, end_s - max(start_s, until))
        until = max(until, end_s)
    return total


def joined(replies: Sequence[Reply]) -> Reply:
    """The replies of rows that follow each other as one; in `extra`, None for those that store nothing."""
    extra = {
        name: [value for reply in replies for value in reply.extra.get(name, [None] * len(reply.values))]
        for name in {name: None for reply in replies for name in reply.extra}
    }
    return Reply(
        [value for reply in replies for value in reply.values],
        [failure for reply in replies for failure in reply.failures],
        extra,
    )


class _Looped:
    """A caller whose calls are coroutines of a pool. A call of several rows that fails as a whole is made again, row by
    row, unless the function looks at the whole group."""

    def __init__(self, pool: Pool, call: Call, splits: bool) -> None:
        self._pool = pool
        self._call = call
        self._splits = splits

    def start(self, request: RewardCall) -> Future[Outcome]:
        return self._pool.run(_outcome(self._call, request, self._splits))


async def _outcome(call: Call, request: RewardCall, splits: bool) -> Outcome:
    spans: list[tuple[float, float]] = []

    async def timed(part: RewardCall) -> Reply:
        start_s = time.perf_counter()
        try:
            reply = await call(part)
        except Exception as error:  # inputs that cannot be sent, no process to be had: no reason to end the rank
            reply = failed(Failure("invalid", f"could not be called: {describe(error, None)}"), len(part.lengths))
        spans.append((start_s, time.perf_counter()))
        return reply

    reply = await timed(request)
    if reply.whole and splits:
        reply = joined(await asyncio.gather(*(timed(request.rows([row])) for row in range(len(request.lengths)))))
    return Outcome(reply, spans)


def _death(status: int | None, rows: int) -> Reply:
    how = {None: "", -9: " (killed: by the system for its memory, by itself, or for closing its socket)"}.get(
        status, f" (exit status {status})" if status is not None and status >= 0 else f" (signal {-(status or 0)})"
    )
    return failed(Failure("died", f"ended its process{how}"), rows)


class Workers:
    """Processes that take one call at a time. The first calls start them."""

    def __init__(self, fork_server: ForkServer, count: int) -> None:
        self._fork_server = fork_server
        self._count = count
        self._slots = asyncio.Semaphore(count)
        self._turn = asyncio.Lock()
        self._idle: list[Worker] = []

    async def call(self, index: int, request: RewardCall, timeout_s: float, kind: str = "sync") -> Reply:
        """Call a function as soon as a process is free; `timeout_s` counts from then.

        Args:
            kind: of the process: `sync`, or a new one that is `async`.
        """
        async with self._slots:
            reply = await self._ask(index, request, timeout_s, kind)
        if reply is None:
            # The fork server was killed, and every worker with it. Whose deed that was shows when each works alone.
            async with self._turn, AsyncExitStack() as slots:
                for _ in range(self._count):
                    await slots.enter_async_context(self._slots)
                reply = await self._ask(index, request, timeout_s, kind)
        return reply or _death(None, len(request.lengths))

    async def _ask(self, index: int, request: RewardCall, timeout_s: float, kind: str) -> Reply | None:
        """None where the fork_server is gone as well as the process."""
        rows = len(request.lengths)
        worker = await self._free(kind)
        grace_s = _ASYNC_GRACE_SECONDS if kind == "async" else 0.0
        try:
            reply = await asyncio.wait_for(worker.ask(index, request, timeout_s), timeout_s + grace_s)
        except asyncio.TimeoutError:
            worker.end()
            return timed_out(timeout_s, rows)
        except (EOFError, OSError):
            status = worker.end()
            return None if status is None else _death(status, rows)
        except BaseException:
            worker.end()
            raise
        if reply.spent or kind == "async":
            worker.end()
        else:
            self._idle.append(worker)
        return reply

    async def _free(self, kind: str) -> Worker:
        while kind == "sync" and self._idle:
            worker = self._idle.pop()
            if not worker.is_gone():
                return worker
            worker.end()
        return await Worker.hire(self._fork_server, kind)


class Tasks:
    """One process for the many calls of an `async def` function. Where it dies or stands still, those under way are
    made again, each in a process of its own: so that one cannot spoil the others."""

    def __init__(self, fork_server: ForkServer, workers: Workers) -> None:
        self._fork_server = fork_server
        self._workers = workers
        self._slots = asyncio.Semaphore(_ASYNC_CALLS)
        self._hiring = asyncio.Lock()
        self._worker: Worker | None = None
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._listener: asyncio.Task[None] | None = None

    async def call(self, index: int, request: RewardCall, timeout_s: float) -> Reply:
        """Call the function; `timeout_s` counts from when fewer than 64 calls are under way."""
        async with self._slots:
            reply = await self._ask(index, request, timeout_s)
        return reply or await self._workers.call(index, request, timeout_s, "async")

    async def _ask(self, index: int, request: RewardCall, timeout_s: float) -> Reply | None:
        """None where the process is lost, and other calls with it."""
        worker = await self._running()
        number = worker.number()
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await worker.send(number, index, request, timeout_s)
            reply = await asyncio.wait_for(answer, timeout_s + _ASYNC_GRACE_SECONDS)
        except asyncio.TimeoutError:
            alone = list(self._waiting.values()) == [answer]
            self._lose(worker)
            return timed_out(timeout_s, len(request.lengths)) if alone else None
        except (EOFError, OSError):
            self._lose(worker)
            return None
        finally:
            if self._waiting.get(number) is answer:
                del self._waiting[number]
        if reply.spent:
            self._lose(worker)
        return reply

    async def _running(self) -> Worker:
        async with self._hiring:
            if self._worker is None:
                self._worker = await Worker.hire(self._fork_server, "async")
                self._listener = asyncio.create_task(self._listen(self._worker))
            return self._worker

    async def _listen(self, worker: Worker) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, reply = await worker.receive()
                answer = self._waiting.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        if worker is not self._worker:
            return
        worker.end()
        self._worker = None
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(EOFError())


class Threads:
    """A thread for the calls of one function, one by one; one that takes too long is left, and another made."""

    def __init__(self, enter: Callable[[], None]) -> None:
        self._enter = enter
        self._turn = asyncio.Semaphore(1)
        self._jobs: SimpleQueue[Any] | None = None

    async def call(self, function: Function, request: RewardCall, timeout_s: float) -> Reply:
        """Call the function; `timeout_s` counts from its turn."""
        async with self._turn:
            if self._jobs is None:
                self._jobs = SimpleQueue()
                threading.Thread(target=_run_jobs, args=(self._enter, self._jobs), name="reward", daemon=True).start()
            answer: Future[Reply] = Future()
            self._jobs.put((answer, function, request))
            try:
                return await asyncio.wait_for(asyncio.wrap_future(answer), timeout_s)
            except asyncio.TimeoutError:
                self._leave()
                return timed_out(timeout_s, len(request.lengths))
            except asyncio.CancelledError:
                self._leave()  # the next call would wait for this one
                raise

    def _leave(self) -> None:
        assert self._jobs is not None
        self._jobs.put(None)
        self._jobs = None


def _run_jobs(enter: Callable[[], None], jobs: SimpleQueue[Any]) -> None:
    enter()
    while (job := jobs.get()) is not None:
        answer, function, request = job
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(function.score(copy.deepcopy(request)))  # it may change what it is given
            except Exception as error:  # what cannot be copied; the thread is there for the next call
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
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(timeout=5)
