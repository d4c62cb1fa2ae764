"""Processes that hold objects of the user's for a while: one object each, or as many as the class allows.

Orders are sent by the thread that gives them, and replies are read as they come by the loop of the Pool. A game gives
hundreds of orders in a second of decoding, whose thread they must not hold up: so no order has a task or a timer. A
process carries out one order at a time, in the order in which they were given.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybrid_grpo.config.user_code import describe
from hybrid_grpo.workers.calls import Call, Failure, Reply, failed
from hybrid_grpo.workers.processes import ForkServer
from hybrid_grpo.workers.replies import Expected, decode_reply, new_number
from hybrid_grpo.workers.worker import died, framed, timed_out, unframed

Done = Callable[[Reply], None]
"""Called with the reply to an order, on any thread."""
_PART = 1 << 15
"""Most bytes read at once."""


class Seat:
    """The place of one object in a process, from its first order until it is left. Where an order takes too long, or
    ends the process, it and all later ones have failed.

    Args:
        index: of the object's entry, in its fork server.
        shares: most objects in one process.
    """

    def __init__(self, seats: Seats, index: int, shares: int) -> None:
        self._seats, self._number = seats, next(seats.numbers)
        self.index, self.shares = index, shares
        self.process: _Process | None = None
        self.lost: Reply | None = None
        """The reply to all orders once the process is lost."""
        self.waiting: list[_Order] = []
        """Orders given before there is a process."""

    def ask(self, order: dict[str, Any], done: Done) -> None:
        """Give an order; `done` is called with the reply once."""
        call = Call({"order": [{**order, "number": self._number}]}, [order["do"]])
        try:
            number = new_number()
            message = framed(pickle.dumps((number, self.index, call, self._seats.timeout_s)))
        except Exception as error:  # such as columns that cannot be pickled
            return done(failed(Failure("invalid", f"could not be called: {describe(error, None)}"), 1))
        entry = self._seats.fork_server.entries[self.index]
        sent = _Order(self, {number: Expected(entry, call.expected)}, message, done)
        with self._seats.lock:
            if self.lost is None:
                if self.process is not None:
                    return self.process.give(sent)
                self.waiting.append(sent)
                if len(self.waiting) == 1:
                    self._seats.place(self)
                return
        done(self.lost)

    def leave(self) -> None:
        """Close the object, and leave its place to others, once all orders are carried out. What closing does to the
        process, or how long it takes, changes no earlier reply."""
        with self._seats.lock:
            if self.lost is not None or (self.process is None and not self.waiting):
                return
        self.ask({"do": "close"}, lambda _: self._seats.take_back(self))


@dataclass(frozen=True)
class _Order:
    seat: Seat
    expected: dict[int, Expected]
    message: bytes
    done: Done


class _Process:
    """A worker process and the connection to it; `seats` are those that have it."""

    def __init__(self, seats: Seats) -> None:
        self._all = seats
        self.seats: set[Seat] = set()
        self.is_ending = False
        self.orders: deque[_Order] = deque()
        """The first is under way."""
        self._pid, self._connection = seats.fork_server.fork_worker("sync")
        self._connection.setblocking(False)
        self._received = bytearray()
        seats.loop.add_reader(self._connection, self._read)

    def give(self, order: _Order) -> None:
        """Take an order, on any thread, with the lock held."""
        self.orders.append(order)
        if len(self.orders) == 1 and not self.is_ending:
            self._send_first()

    def _send_first(self) -> None:
        """Send an order. That the process is gone is noticed by the loop."""
        message = self.orders[0].message
        self._all.deadlines_s[self] = time.monotonic() + self._all.timeout_s
        sent = self._sent(message)
        if sent < len(message):
            self._all.loop.call_soon_threadsafe(self._send_rest, message[sent:])

    def _sent(self, message: bytes) -> int:
        try:
            return self._connection.send(message)
        except OSError:  # it is full, or the process is gone
            return 0

    def _send_rest(self, rest: bytes) -> None:
        """Send what is left of a long order, in the loop's thread, as the process reads."""
        if self._connection.fileno() < 0:
            return
        self._all.loop.remove_writer(self._connection)
        rest = rest[self._sent(rest) :]
        if rest:
            self._all.loop.add_writer(self._connection, self._send_rest, rest)

    def _read(self) -> None:
        """Take what has come: a part of a reply, or the end of the process."""
        try:
            part = self._connection.recv(_PART)
            self._received += part
            message = unframed(self._received)
            if part and message is None:
                return
            # No message: the process has ended. One that is not a reply: a function may write to whatever descriptor it
            # finds.
            decoded = decode_reply(message or b"", self.orders[0].expected if self.orders else {})
            if decoded is None:
                raise EOFError("a reply to something else")
            reply = decoded[1]
        except BlockingIOError:
            return
        except (EOFError, OSError, ValueError):
            return self._all.lose(self)
        if reply.spent:
            return self._all.lose(self, reply)
        with self._all.lock:
            order = self.orders.popleft()
            del self._all.deadlines_s[self]
            if self.orders:
                self._send_first()
        order.done(reply)

    def end(self) -> int | None:
        """Kill the process; its exit status, see `ForkServer.end`."""
        self._all.loop.remove_reader(self._connection)
        self._all.loop.remove_writer(self._connection)
        status = self._all.fork_server.end(self._pid)
        self._connection.close()  # only now: the process would end by itself, with another status
        return status


class Seats:
    """The processes for objects. They are started when they are needed, and used again and again; an object for which
    there is no process waits until another is left.

    Args:
        loop: reads replies, and starts and ends processes.
        timeout_s: seconds of one order, from when its process begins with it.
        most: most processes; None for as many as there are objects.

    Attributes:
        deadlines_s: when the orders under way have taken too long, by `time.monotonic`.
        lock: of all that is changed by the threads of orders and by the loop's.
    """

    def __init__(
        self, fork_server: ForkServer, loop: asyncio.AbstractEventLoop, timeout_s: float, most: int | None
    ) -> None:
        self.fork_server, self.loop = fork_server, loop
        self.timeout_s, self._most = timeout_s, most
        self.deadlines_s: dict[_Process, float] = {}
        self.lock, self.numbers = threading.Lock(), itertools.count()
        self._count = 0
        """Processes that are there, or being started."""
        self._starting = 0
        self._idle: list[_Process] = []
        self._with_room: defaultdict[int, dict[_Process, None]] = defaultdict(dict)
        """Processes that hold objects of an entry, and may hold more."""
        self._queue: deque[Seat] = deque()
        loop.call_soon_threadsafe(self._watch)

    def seat(self, index: int, shares: int = 1) -> Seat:
        """A seat for an object of the entry with this index, of which a process may hold `shares`."""
        return Seat(self, index, shares)

    def place(self, seat: Seat) -> None:
        """Find a process for an object, with the lock held; it may have to wait for one."""
        self._queue.append(seat)
        self._place_waiting()

    def _place_waiting(self) -> None:
        """Place the objects that wait, with the lock held, in the order in which they came."""
        while self._queue:
            process = self._process_for(self._queue[0])
            if process is None:
                break
            seat = self._queue.popleft()
            process.seats.add(seat)
            self._sort(process, seat)
            seat.process = process
            for order in seat.waiting:
                process.give(order)
            seat.waiting = []
        while self._starting < len(self._queue) and (self._most is None or self._count < self._most):
            self._starting += 1
            self._count += 1
            self.loop.call_soon_threadsafe(self._start)

    def _process_for(self, seat: Seat) -> _Process | None:
        if with_room := self._with_room[seat.index]:
            return next(reversed(with_room))
        return self._idle.pop() if self._idle else None

    def _sort(self, process: _Process, seat: Seat) -> None:
        """Note whether a process has room, with the lock held, after `seat` came or went."""
        self._with_room[seat.index].pop(process, None)
        if not process.seats:
            self._idle.append(process)
        elif len(process.seats) < seat.shares:
            self._with_room[seat.index][process] = None

    def _start(self) -> None:
        """Start a process, in the loop's thread, unless none is needed any longer."""
        process, reply = None, None
        if self._queue:
            try:
                process = _Process(self)
            except Exception as error:  # such as a fork server that cannot be started again
                reply = failed(Failure("died", f"could not be started: {describe(error, None)}"), 1)
        with self.lock:
            self._starting -= 1
            waiting: list[_Order] = []
            if process is not None:
                self._idle.append(process)
                return self._place_waiting()
            self._count -= 1
            if reply is None or self._count > self._starting or not self._queue:
                return  # where there are other processes, the object waits for one of them
            seat = self._queue.popleft()
            seat.lost, waiting, seat.waiting = reply, seat.waiting, []
            self._place_waiting()
        for order in waiting:
            order.done(reply)

    def take_back(self, seat: Seat) -> None:
        """Give the place of an object that is closed to others."""
        with self.lock:
            if seat.process is not None:
                seat.process.seats.discard(seat)
                self._sort(seat.process, seat)
                seat.process = None
                self._place_waiting()

    def lose(self, process: _Process, reply: Reply | None = None) -> None:
        """End a process, in the loop's thread. The order under way and all later ones of its object get this reply, by
        default that the process has died; objects that shared the process are lost as well."""
        with self.lock:
            self.deadlines_s.pop(process, None)
            process.is_ending = True
            for seat in process.seats:
                self._with_room[seat.index].pop(process, None)
            if process in self._idle:
                self._idle.remove(process)
        status = process.end()
        reply = reply or died(status, 1)
        with self.lock:
            guilty = process.orders[0].seat if process.orders else None
            for seat in process.seats:
                seat.process, seat.lost = None, reply if guilty in (seat, None) else _shared(reply)
            orders, process.orders = process.orders, deque()
            self._count -= 1
            self._place_waiting()
        for order in orders:
            order.done(order.seat.lost or reply)

    def _watch(self) -> None:
        """End the processes whose orders take too long; then look again when the next one may."""
        now_s, deadlines_s = time.monotonic(), self.deadlines_s.copy()
        late = [process for process, deadline_s in deadlines_s.items() if deadline_s <= now_s]
        # An order that is given from now on has a later deadline.
        next_s = min((d for d in deadlines_s.values() if d > now_s), default=now_s + self.timeout_s)
        self.loop.call_later(next_s - now_s, self._watch)
        for process in late:
            self.lose(process, timed_out(self.timeout_s, 1))


def _shared(reply: Reply) -> Reply:
    failure = reply.failures[0]
    assert failure is not None
    return failed(Failure("died", f"shared its process with another, which {failure.message}"), 1)
