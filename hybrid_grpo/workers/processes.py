"""The rank's side of the worker processes (worker.py): the fork server, its workers, the connections to them."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from hybrid_grpo.config import ScoringConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.workers.calls import Call, Entry, Interface, Reply
from hybrid_grpo.workers.replies import Expected, decode_reply, new_number
from hybrid_grpo.workers.worker import framed, read_frame

_VARIABLE = re.compile(
    r"(^|_)(TOKENS?|KEY|KEYS|KEY_ID|AUTH|CREDENTIALS?)$|SECRET|PASSWORD|PASSWD|PASSPHRASE|_TOKEN_|API_?KEY",
    re.IGNORECASE,
)
_MOST_PRINTED = 4 << 20
"""Bytes that the processes of a fork server may print, to each stream."""
_END_SECONDS = 2.0
"""For a fork server to end its workers and itself."""


class ForkServer:
    """The process that workers are forked from; see worker.py. Used by one thread at a time.

    Creating it raises UserError where a function cannot be imported, or where its settings do not fit.
    """

    def __init__(self, entries: Sequence[tuple[str, Entry]], scoring: ScoringConfig) -> None:
        self._orders = pickle.dumps((sys.path, entries, int(scoring.memory_gb * 2**30)))
        self._scoring = scoring
        self.entries = [entry for _, entry in entries]
        self._named = set(scoring.secrets).union(*(named_variables(entry.kwargs) for _, entry in entries))
        self.connections: set[asyncio.StreamWriter] = set()
        """To the workers."""
        self.interfaces = self._start()

    def _start(self) -> list[Interface]:
        self._control, theirs = socket.socketpair()
        package = str(Path(__file__).parents[3])
        code = (
            f"import sys; sys.path.insert(0, {package!r});"
            " from hybrid_grpo.workers.worker import serve_forks;"
            f" serve_forks({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                # Away from the terminal: Ctrl-C is for the rank, which ends its processes itself.
                start_new_session=True,
                # There are many workers: one thread of a numerical library in each.
                env={**public_environment(os.environ, self._named), "OMP_NUM_THREADS": "1"},
            )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._printers = [
            threading.Thread(target=_forward, args=(stream, descriptor), daemon=True)
            for stream, descriptor in ((process.stdout, 1), (process.stderr, 2))
        ]
        for printer in self._printers:
            printer.start()
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(self._orders)
        self._process = process
        # Reaps the process whenever it ends.
        threading.Thread(target=process.wait, daemon=True).start()
        self._control.settimeout(self._scoring.max_import_s)
        self._answers = self._control.makefile("rb")
        try:
            answer = self._answer()
        except TimeoutError:
            process.kill()
            raise UserError(
                "rewards: importing the functions takes longer than scoring.max_import_s"
                f" {self._scoring.max_import_s:g}: look for what their modules do outside of functions, or raise it"
            ) from None
        except EOFError:
            raise UserError(
                "rewards: the process that imports the functions died: import them by hand to see why"
            ) from None
        if "error" in answer:
            raise UserError(answer["error"])
        self._control.settimeout(30.0)
        return [Interface(**interface) for interface in answer["interfaces"]]

    async def start_worker(self, kind: str) -> Worker:
        """A new worker, `sync` or `async`."""
        pid, connection = self.fork_worker(kind)
        reader, writer = await asyncio.open_connection(sock=connection)
        self.connections.add(writer)
        return Worker(self, pid, reader, writer)

    def fork_worker(self, kind: str) -> tuple[int, socket.socket]:
        """The process of a new worker, `sync` or `async`, and the socket to it."""
        try:
            return self._fork(kind)
        except (OSError, EOFError):
            # The fork server was killed, and all workers with it: start another.
            self.close()
            self._start()
            return self._fork(kind)

    def _fork(self, kind: str) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [f"fork {kind}".encode()], [theirs.fileno()])
        return int(self._answer()), ours

    def end(self, pid: int) -> int | None:
        """Kill a worker; its exit status, negative for the signal that ended it. None if its fork server is gone."""
        try:
            self._control.sendall(f"end {pid}".encode())
            answer = self._answer()
        except (OSError, EOFError):
            self.close()  # a late answer would be taken for the answer to another command
            return None
        return None if answer is None else int(answer)

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def close(self) -> None:
        """End the fork server and all workers, with all that they have started."""
        # Both, or the socket stays open, and the fork server does not see its end.
        self._answers.close()
        self._control.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # a function has stopped it: it does not see that the socket is closed
            with suppress(psutil.NoSuchProcess):
                family = psutil.Process(self._process.pid).children(recursive=True)
                self._process.kill()
                for process in family:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
        for printer in self._printers:
            printer.join(0.2)  # what was printed last; a process that got away keeps the streams open
        for connection in self.connections:
            connection.transport.abort()
        self.connections.clear()


def _forward(stream: IO[bytes], descriptor: int) -> None:
    """Print what comes from a stream until it ends, and of more than `_MOST_PRINTED` bytes no more than a notice."""
    left = _MOST_PRINTED
    with stream, suppress(OSError):
        while text := os.read(stream.fileno(), 1 << 16):
            if left > 0 and len(text) >= left:
                text = (
                    text[:left]
                    + b"\nWARNING: reward functions, tools or environments print more than "
                    + (f"{_MOST_PRINTED >> 20} MiB: the rest is left out\n".encode())
                )
                left = 0
            elif left > 0:
                left -= len(text)
            else:
                continue
            while text:
                text = text[os.write(descriptor, text) :]


class Worker:
    """One worker process and the connection to it."""

    def __init__(
        self, fork_server: ForkServer, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._fork_server = fork_server
        self._pid = pid
        self._reader = reader
        self._writer = writer
        self._expected: dict[int, Expected] = {}
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._listener = asyncio.create_task(self._listen())

    def is_gone(self) -> bool:
        """Whether the process was ended, or has ended."""
        return self._listener.done() or self._reader.at_eof()

    async def ask(self, index: int, call: Call, timeout_s: float) -> Reply:
        """Send a call, and wait for its reply. Several calls can be under way if the worker is `async`.

        Raises EOFError or OSError where the process is gone, or where what it sends is not a reply.
        """
        if self._listener.done():
            raise EOFError
        number = new_number()
        self._expected[number] = Expected(self._fork_server.entries[index], call.expected)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(framed(pickle.dumps((number, index, call, timeout_s))))
            await self._writer.drain()
            return await answer
        finally:
            del self._waiting[number], self._expected[number]

    async def _listen(self) -> None:
        # ValueError: no reply. A function may write to whatever descriptor it finds.
        with suppress(EOFError, OSError, ValueError):
            while True:
                decoded = decode_reply(await read_frame(self._reader), self._expected)
                if decoded is not None and not self._waiting[decoded[0]].done():
                    self._waiting[decoded[0]].set_result(decoded[1])
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EOFError())

    def end(self) -> int | None:
        """Kill the process; its exit status, see `ForkServer.end`."""
        self._fork_server.connections.discard(self._writer)
        self._writer.transport.abort()
        return self._fork_server.end(self._pid)


def public_environment(environment: Mapping[str, str], named: set[str]) -> dict[str, str]:
    """The variables whose names do not look like those of secrets, and those that settings name."""
    return {name: value for name, value in environment.items() if name in named or not _VARIABLE.search(name)}


def named_variables(kwargs: Mapping[str, Any]) -> set[str]:
    """Variables of the environment that the arguments of a function name, as in `token_env: MY_TOKEN`."""
    return {value for name, value in kwargs.items() if name.endswith("_env") and isinstance(value, str)}
