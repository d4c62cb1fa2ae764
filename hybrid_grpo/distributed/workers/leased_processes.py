"""Leases worker processes to objects of users' classes, one to each.

The thread that makes a request also sends it; the Pool's event loop reads replies as they arrive. A game makes hundreds
of requests per second of decoding and must not hold up the decoding thread, so no request has a task or a timer. A
process carries out one request at a time, in the order in which they were made.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybrid_grpo.config.user_code import describe
from hybrid_grpo.distributed.workers.calls import Call, Failure, Reply, died, failed, timed_out
from hybrid_grpo.distributed.workers.messages import PendingCall
from hybrid_grpo.distributed.workers.processes import ForkServer, Worker

Done = Callable[[Reply], None]
"""Called with the reply to a request, on any thread."""


class Lease:
    """The lease of a process for one object, from the object's first request until its release. If a request takes too
    long, or ends the process, that request and all later ones fail.

    Args:
        index: index of the object's entry in the fork server.
    """

    def __init__(self, leases: Leases, index: int) -> None:
        self._leases, self._index = leases, index
        self.process: _Process | None = None
        self.lost: Reply | None = None
        """The reply to all requests after the process is lost; None until then."""
        self.waiting: list[_Request] = []
        """Requests that were made before the object got a process."""

    def ask(self, request: dict[str, Any], done: Done) -> None:
        """Make a request; `done` is called once, with the reply."""
        call = Call({"request": [request]}, [request["do"]])
        leases = self._leases
        try:
            pending = PendingCall.of(leases.fork_server.entries[self._index], self._index, call, leases.timeout_s)
        except Exception as error:  # such as columns that cannot be pickled
            return done(failed(Failure("invalid", f"could not be called: {describe(error, None)}"), 1))
        made = _Request(self, pending, done)
        with leases.lock:
            if self.lost is None:
                if self.process is not None:
                    return self.process.give(made)
                self.waiting.append(made)
                if len(self.waiting) == 1:
                    leases.place(self)
                return
        done(self.lost)

    def release(self) -> None:
        """Close the object once all its requests are carried out, and give its place to others. Earlier replies stay
        valid even if closing takes too long or ends the process."""
        with self._leases.lock:
            if self.lost is not None or (self.process is None and not self.waiting):
                return
        self.ask({"do": "close"}, lambda _: self._leases.take_back(self))


@dataclass(frozen=True)
class _Request:
    lease: Lease
    call: PendingCall
    done: Done


class _Process:
    """A worker and the requests it was given; `lease` is that of the object that it holds, None if it holds none."""

    def __init__(self, all_leases: Leases) -> None:
        self._all = all_leases
        self.lease: Lease | None = None
        self.is_ending = False
        self.requests: deque[_Request] = deque()
        """The requests in order; the process is carrying out the first one."""
        self.worker = Worker(all_leases.fork_server, all_leases.loop, "sync", lambda: all_leases.lose(self))

    def give(self, request: _Request) -> None:
        """Add a request. Called on any thread, with the lock held."""
        self.requests.append(request)
        if len(self.requests) == 1 and not self.is_ending:
            self._send_first()

    def _send_first(self) -> None:
        self._all.deadlines_s[self] = time.monotonic() + self._all.timeout_s
        self.worker.send(self.requests[0].call, self._take)

    def _take(self, reply: Reply | None) -> None:
        """Pass on `reply`, which answers the first request. Called on the loop's thread."""
        if reply is None:
            return  # the process is lost: `lose` replies
        if reply.spent:
            return self._all.lose(self, reply)
        with self._all.lock:
            request = self.requests.popleft()
            del self._all.deadlines_s[self]
            if self.requests:
                self._send_first()
        request.done(reply)


class Leases:
    """The processes that hold objects. They are started when needed, and reused. An object for which there is no
    process waits until another object is released.

    Args:
        loop: reads replies, and starts and ends processes.
        timeout_s: seconds that one request may take, from the moment at which its process begins it.
        most: maximum number of processes; None for as many as there are objects.

    Attributes:
        deadlines_s: the time, by `time.monotonic`, by which each process must finish its current request.
        lock: guards whatever both the requesting threads and the loop's thread change.
    """

    def __init__(
        self, fork_server: ForkServer, loop: asyncio.AbstractEventLoop, timeout_s: float, most: int | None
    ) -> None:
        self.fork_server, self.loop = fork_server, loop
        self.timeout_s, self._most = timeout_s, most
        self.deadlines_s: dict[_Process, float] = {}
        self.lock = threading.Lock()
        self._count = 0
        """Processes that exist, or are being started."""
        self._starting = 0
        self._idle: list[_Process] = []
        self._queue: deque[Lease] = deque()
        loop.call_soon_threadsafe(self._watch)

    def lease(self, index: int) -> Lease:
        return Lease(self, index)

    def place(self, lease: Lease) -> None:
        """Find a process for an object, which may have to wait for one. Called with the lock held."""
        self._queue.append(lease)
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Place the waiting objects, in the order in which they came. Called with the lock held."""
        while self._queue and self._idle:
            lease, process = self._queue.popleft(), self._idle.pop()
            process.lease, lease.process = lease, process
            for request in lease.waiting:
                process.give(request)
            lease.waiting = []
        while self._starting < len(self._queue) and (self._most is None or self._count < self._most):
            self._starting += 1
            self._count += 1
            self.loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        """Start a process, unless none is needed any longer. Called on the loop's thread."""
        process, reply = None, None
        if self._queue:
            try:
                process = _Process(self)
            except Exception as error:  # such as a fork server that cannot be started again
                reply = failed(Failure("died", f"could not be started: {describe(error, None)}"), 1)
        with self.lock:
            self._starting -= 1
            if process is not None:
                self._idle.append(process)
                return self._place_waiting()
            self._count -= 1
            if reply is None or self._count > self._starting or not self._queue:
                return  # if there are other processes, the object waits for one of them
            lease = self._queue.popleft()
            lease.lost, waiting, lease.waiting = reply, lease.waiting, []
            self._place_waiting()
        for request in waiting:
            request.done(reply)

    def take_back(self, lease: Lease) -> None:
        """Give the place of a closed object to others."""
        with self.lock:
            if lease.process is not None:
                lease.process.lease = None
                self._idle.append(lease.process)
                lease.process = None
                self._place_waiting()

    def lose(self, process: _Process, reply: Reply | None = None) -> None:
        """End a process; called on the loop's thread. The request in progress, and all later requests of its object,
        get `reply`, by default one that says that the process died."""
        with self.lock:
            self.deadlines_s.pop(process, None)
            process.is_ending = True
            if process in self._idle:
                self._idle.remove(process)
        status = process.worker.end()
        reply = reply or died(status, 1)
        with self.lock:
            if process.lease is not None:
                process.lease.process, process.lease.lost = None, reply
            requests, process.requests = process.requests, deque()
            self._count -= 1
            self._place_waiting()
        for request in requests:
            request.done(reply)

    def _watch(self) -> None:
        """End the processes whose requests take too long, and call this method again at the next deadline."""
        now_s, deadlines_s = time.monotonic(), self.deadlines_s.copy()
        late = [process for process, deadline_s in deadlines_s.items() if deadline_s <= now_s]
        # A request that is made from now on has a later deadline.
        next_s = min((d for d in deadlines_s.values() if d > now_s), default=now_s + self.timeout_s)
        self.loop.call_later(next_s - now_s, self._watch)
        for process in late:
            self.lose(process, timed_out(self.timeout_s, 1))
