"""Processes that hold an object of the user's for a while: one process for each object, one order after the other.

Orders are sent by the thread that gives them, and replies are read as they come by the loop of the Pool. A game gives
hundreds of orders in a second of decoding, whose thread they must not hold up: so no order has a task or a timer.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hybrid_grpo.config.importing import describe
from hybrid_grpo.rewards.functions import Failure, Reply, RewardCall, failed
from hybrid_grpo.rewards.workers.processes import ForkServer
from hybrid_grpo.rewards.workers.worker import decode_reply, died, framed, timed_out, unframed

Done = Callable[[Reply], None]
"""Is told the reply to an order, in whatever thread."""
_PART = 1 << 15
"""Most bytes read at once."""


class Seat:
    """The process of one object, from its first order until it is left. Orders are carried out in the order in which
    they were given. Where one takes too long, or ends the process, it and all later ones have failed."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._orders: deque[tuple[bytes, Done]] = deque()
        """The first is under way."""
        self._process: _Process | None = None
        self._lost: Reply | None = None
        self._is_left = False
        self._lock = threading.Lock()

    def ask(self, order: dict[str, Any], done: Done) -> None:
        """Give an order; `done` is told the reply once."""
        call = RewardCall({"order": [order]}, [0])
        try:
            message = framed(pickle.dumps((0, self._seats.index, call, self._seats.timeout_s)))
        except Exception as error:  # such as columns that cannot be pickled
            return done(failed(Failure("invalid", f"could not be called: {describe(error, None)}"), 1))
        with self._lock:
            if self._lost is None:
                self._orders.append((message, done))
                if len(self._orders) == 1:
                    self._send()
                return
        done(self._lost)

    def leave(self) -> None:
        """Leave the process to other objects, once all orders are carried out."""
        self._is_left = True
        self._seats.loop.call_soon_threadsafe(self._give_back)

    def _send(self) -> None:
        """Send the first order, with the lock held; in the loop's thread where a process is to be started."""
        self._process = self._process or self._seats.idle_process(self)
        if self._process is None:
            self._seats.loop.call_soon_threadsafe(self._start)
        else:
            self._seats.deadlines_s[self] = time.monotonic() + self._seats.timeout_s
            self._process.send(self._orders[0][0])

    def _start(self) -> None:
        with self._lock:
            try:
                self._process = self._seats.start_process(self)
                return self._send()
            except Exception as error:  # such as a fork server that cannot be started again
                failure = Failure("died", f"could not be started: {describe(error, None)}")
                reply = failed(failure, 1)
                waiting = self._fail(reply)
        for done in waiting:
            done(reply)

    def take(self, reply: Reply) -> None:
        """Take the reply to the order under way, in the loop's thread."""
        if reply.spent:
            return self.lose(reply)
        with self._lock:
            _, done = self._orders.popleft()
            del self._seats.deadlines_s[self]
            if self._orders:
                self._send()
        done(reply)
        self._give_back()

    def lose(self, reply: Reply | None = None) -> None:
        """End the process, in the loop's thread; the order under way and all later ones get this reply. Default: that
        the process has died."""
        with self._lock:
            assert self._process is not None
            status = self._process.end()
            self._process = None
            reply = reply or died(status, 1)
            waiting = self._fail(reply)
        for done in waiting:
            done(reply)

    def _fail(self, reply: Reply) -> list[Done]:
        """Fail all orders, with the lock held; returns who is to be told so, without it."""
        self._seats.deadlines_s.pop(self, None)
        waiting, self._lost = [done for _, done in self._orders], reply
        self._orders.clear()
        return waiting

    def _give_back(self) -> None:
        with self._lock:
            if self._is_left and not self._orders and self._process is not None:
                self._seats.take_back(self._process)
                self._process = None


class _Process:
    """A worker process and the connection to it; `seat` is who has it."""

    def __init__(self, seats: Seats, seat: Seat) -> None:
        self._seats = seats
        self.seat: Seat | None = seat
        self._pid, self._connection = seats.fork_server.fork_worker("sync")
        self._connection.setblocking(False)
        self._received = bytearray()
        seats.loop.add_reader(self._connection, self._read)

    def send(self, message: bytes) -> None:
        """Send an order, in whatever thread. That the process is gone is noticed by the loop."""
        sent = self._sent(message)
        if sent < len(message):
            self._seats.loop.call_soon_threadsafe(self._send_rest, message[sent:])

    def _sent(self, message: bytes) -> int:
        try:
            return self._connection.send(message)
        except OSError:  # it is full, or the process is gone
            return 0

    def _send_rest(self, rest: bytes) -> None:
        """Send what is left of a long order, in the loop's thread, as the process reads."""
        if self._connection.fileno() < 0:
            return
        self._seats.loop.remove_writer(self._connection)
        rest = rest[self._sent(rest) :]
        if rest:
            self._seats.loop.add_writer(self._connection, self._send_rest, rest)

    def _read(self) -> None:
        """Take what has come: a part of a reply, or the end of the process."""
        try:
            part = self._connection.recv(_PART)
            self._received += part
            message = unframed(self._received)
            if part and message is None:
                return
            # No message: the process has ended. One that is no reply: a function may write to whatever descriptor it
            # finds.
            reply = decode_reply(message or b"")[1]
            if len(reply.values) != 1 or self.seat is None:
                raise EOFError("a reply to something else")
        except BlockingIOError:
            return
        except (EOFError, OSError, ValueError, TypeError, AttributeError):
            self._seats.remove(self)
            if self.seat is None:
                self.end()
            else:
                self.seat.lose()
            return
        self.seat.take(reply)

    def end(self) -> int | None:
        """Kill the process; its exit status, see `ForkServer.end`."""
        self._seats.loop.remove_reader(self._connection)
        self._seats.loop.remove_writer(self._connection)
        status = self._seats.fork_server.end(self._pid)
        self._connection.close()  # only now: the process would end by itself, with another status
        return status


class Seats:
    """The processes for objects of one entry. They are started when they are needed, and used again and again.

    Args:
        loop: reads replies, and starts and ends processes.
        index: of the entry, in its fork server.
        timeout_s: seconds of one order.

    Attributes:
        deadlines_s: when the orders under way have taken too long, by `time.monotonic`.
    """

    def __init__(self, fork_server: ForkServer, loop: asyncio.AbstractEventLoop, index: int, timeout_s: float) -> None:
        self.fork_server, self.loop = fork_server, loop
        self.index, self.timeout_s = index, timeout_s
        self.deadlines_s: dict[Seat, float] = {}
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        loop.call_soon_threadsafe(self._watch)

    def seat(self) -> Seat:
        """A seat for an object."""
        return Seat(self)

    def idle_process(self, seat: Seat) -> _Process | None:
        """A process that holds no object, for this seat; None where there is none."""
        with self._lock:
            if not self._idle:
                return None
            process = self._idle.pop()
            process.seat = seat
            return process

    def start_process(self, seat: Seat) -> _Process:
        """A new process, in the loop's thread, unless one has become idle meanwhile."""
        return self.idle_process(seat) or _Process(self, seat)

    def take_back(self, process: _Process) -> None:
        """Take a process that holds no object any longer, in the loop's thread."""
        process.seat = None
        self._idle.append(process)

    def remove(self, process: _Process) -> None:
        """Give a process that has ended to nobody, in the loop's thread."""
        with self._lock:
            if process in self._idle:
                self._idle.remove(process)

    def _watch(self) -> None:
        """End the processes whose orders take too long; then look again when the next one may."""
        now_s, deadlines_s = time.monotonic(), self.deadlines_s.copy()
        late = [seat for seat, deadline_s in deadlines_s.items() if deadline_s <= now_s]
        # An order that is given from now on has a later deadline.
        next_s = min((d for d in deadlines_s.values() if d > now_s), default=now_s + self.timeout_s)
        self.loop.call_later(next_s - now_s, self._watch)
        for seat in late:
            seat.lose(timed_out(self.timeout_s, 1))
