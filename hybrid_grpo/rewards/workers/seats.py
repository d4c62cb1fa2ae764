"""Processes that hold an object of the user's for a while: one process for each object, one order after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from hybrid_grpo.config.importing import describe
from hybrid_grpo.rewards.functions import Failure, Reply, RewardCall, failed
from hybrid_grpo.rewards.workers.processes import ForkServer, Worker
from hybrid_grpo.rewards.workers.worker import died, timed_out


class Seat:
    """The process of one object, from its first order until it is left. Orders are carried out in the order in which
    they were given. Where one takes too long, or ends the process, it and all later ones have failed."""

    def __init__(self, seats: Seats) -> None:
        self._seats = seats
        self._order = asyncio.Lock()
        self._worker: Worker | None = None
        self._lost: Reply | None = None

    def ask(self, order: dict[str, Any]) -> Future[Reply]:
        """Give an order; the reply to it is to come."""
        call = RewardCall({"order": [order]}, [0])
        return self._seats.start(self._carry_out(call))

    def leave(self) -> None:
        """Leave the process to other objects, once all orders are carried out."""
        self._seats.start(self._left())

    async def _carry_out(self, call: RewardCall) -> Reply:
        async with self._order:
            if self._lost is None:
                try:
                    return await self._asked(call)
                except Exception as error:  # such as columns that cannot be pickled
                    return failed(Failure("invalid", f"could not be called: {describe(error, None)}"), 1)
            return self._lost

    async def _asked(self, call: RewardCall) -> Reply:
        seats = self._seats
        worker = self._worker = self._worker or await seats.free()
        try:
            reply = await asyncio.wait_for(worker.ask(seats.index, call, seats.timeout_s), seats.timeout_s)
        except asyncio.TimeoutError:
            worker.end()
            self._lost = timed_out(seats.timeout_s, 1)
            return self._lost
        except (EOFError, OSError):
            self._lost = died(worker.end(), 1)
            return self._lost
        except BaseException:
            worker.end()
            self._lost = died(None, 1)
            raise
        if reply.spent:
            worker.end()
            self._lost = reply
        return reply

    async def _left(self) -> None:
        async with self._order:
            if self._worker is not None and self._lost is None:
                self._seats.idle.append(self._worker)
            self._worker, self._lost = None, died(None, 1)


class Seats:
    """The processes for objects of one entry. They are started when they are needed, and used again and again.

    Args:
        loop: carries out orders.
        index: of the entry, in its fork server.
        timeout_s: seconds of one order.
    """

    def __init__(self, fork_server: ForkServer, loop: asyncio.AbstractEventLoop, index: int, timeout_s: float) -> None:
        self._fork_server, self._loop = fork_server, loop
        self.index, self.timeout_s = index, timeout_s
        self.idle: list[Worker] = []

    def seat(self) -> Seat:
        """A seat for an object."""
        return Seat(self)

    async def free(self) -> Worker:
        """A process that holds no object."""
        while self.idle:
            worker = self.idle.pop()
            if not worker.is_gone():
                return worker
            worker.end()
        return await self._fork_server.start_worker("sync")

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin a work in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)
