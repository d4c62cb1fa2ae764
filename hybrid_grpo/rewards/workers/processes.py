"""The rank's side of worker.py: a fork_server, its workers, and the connections to them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.rewards.functions import Interface, Reply, RewardCall
from hybrid_grpo.rewards.workers.worker import HEADER, decode_reply, entries_message, receive

_IMPORT_SECONDS = 300.0
_LARGEST_REPLY = 1 << 28


class ForkServer:
    """The process that workers are forked from; see worker.py. Used by one thread at a time.

    Raises:
        UserError: a function cannot be imported, or its settings do not fit.
    """

    def __init__(self, entries: list[tuple[str, RewardConfig]], memory_bytes: int) -> None:
        self._message = entries_message(entries, memory_bytes)
        self.connections: set[asyncio.StreamWriter] = set()
        """To the workers."""
        self.interfaces = self._start()

    def _start(self) -> list[Interface]:
        self._control, theirs = socket.socketpair()
        package = str(Path(__file__).parents[3])
        code = (
            f"import sys; sys.path.insert(0, {package!r});"
            f" from hybrid_grpo.rewards.workers.worker import serve_forks; serve_forks({theirs.fileno()})"
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                # Away from the terminal: Ctrl-C is for the rank, which ends them.
                start_new_session=True,
                # Workers are many: one thread of a numerical library in each.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(self._message)
        # Reaped whenever it ends.
        threading.Thread(target=process.wait, daemon=True).start()
        self._control.settimeout(_IMPORT_SECONDS)
        try:
            reply = receive(self._control)
        except TimeoutError:
            process.kill()
            raise UserError(
                f"rewards: importing the functions takes longer than {_IMPORT_SECONDS:g} s: look for what their"
                " modules do outside of functions"
            ) from None
        if reply is None:
            raise UserError("rewards: the process that imports the functions died: import them by hand to see why")
        answer = json.loads(reply)
        if "error" in answer:
            raise UserError(answer["error"])
        self._control.settimeout(30.0)
        return [Interface(**interface) for interface in answer["interfaces"]]

    def fork(self, kind: str) -> tuple[int, socket.socket]:
        """A new worker, `sync` or `async`: its number, for `end`, and the socket to it."""
        try:
            return self._fork(kind)
        except (OSError, EOFError):
            # Somebody has killed it, and with it all workers.
            self.close()
            self._start()
            return self._fork(kind)

    def _fork(self, kind: str) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [f"fork {kind}".encode()], [theirs.fileno()])
        return int(self._answer()), ours

    def end(self, pid: int) -> int | None:
        """Kill a worker; its exit status, negative for the signal that ended it. None where its fork_server is gone."""
        try:
            self._control.sendall(f"end {pid}".encode())
            answer = self._answer()
        except (OSError, EOFError):
            self.close()  # an answer that comes late would be taken for that to something else
            return None
        return None if answer is None else int(answer)

    def _answer(self) -> Any:
        reply = receive(self._control)
        if reply is None:
            raise EOFError
        return json.loads(reply)

    def close(self) -> None:
        """End it, and all workers."""
        self._control.close()
        for connection in self.connections:
            connection.transport.abort()
        self.connections.clear()


class Worker:
    """One worker process and the connection to it."""

    def __init__(
        self, fork_server: ForkServer, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._fork_server = fork_server
        self._pid = pid
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self._ended = False

    @classmethod
    async def hire(cls, fork_server: ForkServer, kind: str) -> Worker:
        pid, connection = fork_server.fork(kind)
        reader, writer = await asyncio.open_connection(sock=connection)
        fork_server.connections.add(writer)
        return cls(fork_server, pid, reader, writer)

    def number(self) -> int:
        """For the next request."""
        return next(self._numbers)

    def is_gone(self) -> bool:
        """Whether it was ended, or has ended."""
        return self._ended or self._reader.at_eof()

    async def ask(self, index: int, request: RewardCall, timeout_s: float) -> Reply:
        """Send a request, and wait for the only reply that is due."""
        number = self.number()
        await self.send(number, index, request, timeout_s)
        answered, reply = await self.receive()
        if answered != number or len(reply.values) != len(request.lengths):
            raise EOFError("a reply to something else")
        return reply

    async def send(self, number: int, index: int, request: RewardCall, timeout_s: float) -> None:
        """Send a request; it needs a number of its own."""
        message = pickle.dumps((number, index, request, timeout_s))
        self._writer.write(HEADER.pack(len(message)) + message)
        await self._writer.drain()

    async def receive(self) -> tuple[int, Reply]:
        """The next reply, and the number of its request.

        Raises:
            EOFError, OSError: the process is gone, or what it sends is no reply.
        """
        (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if size > _LARGEST_REPLY:
            raise EOFError(f"a reply of {size} bytes")
        message = await self._reader.readexactly(size)
        try:
            return decode_reply(message)
        except (ValueError, TypeError) as error:  # a function may write to whatever descriptor it finds
            raise EOFError("no reply") from error

    def end(self) -> int | None:
        """Kill it; its exit status, see `ForkServer.end`."""
        self._ended = True
        self._fork_server.connections.discard(self._writer)
        self._writer.transport.abort()
        return self._fork_server.end(self._pid)
