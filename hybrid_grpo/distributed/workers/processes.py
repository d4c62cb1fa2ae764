"""The rank's side of the worker processes (forking.py): the fork server, and its workers with their sockets."""

import asyncio
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hybrid_grpo.config import ScoringConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.user_code import HIDDEN_VARIABLES
from hybrid_grpo.distributed.workers.calls import Call, Entry, Interface, Reply
from hybrid_grpo.distributed.workers.family import descendants, kill
from hybrid_grpo.distributed.workers.messages import PendingCall, decode_reply, unframed

_VARIABLE = re.compile(
    r"(^|_)(TOKENS?|KEY|KEYS|KEY_ID|AUTH|CREDENTIALS?)$|SECRET|PASSWORD|PASSWD|PASSPHRASE|_TOKEN_|API_?KEY",
    re.IGNORECASE,
)
IMPORT_ROOT = Path(__file__).parents[3]
"""The folder from which the package hybrid_grpo is imported, in worker processes as well."""
_MOST_PRINTED = 4 << 20
"""Maximum number of bytes that the processes of a fork server may print to each stream."""
_PART = 1 << 15
"""Maximum number of bytes that are read at once."""
_END_SECONDS = 2.0
"""Seconds that a fork server has to end its workers and itself."""


class ForkServer:
    """The process that workers are forked from; see forking.py. Used by one thread at a time.

    Creating it raises UserError if an entry cannot be loaded.
    """

    def __init__(self, entries: Sequence[tuple[str, Entry]], scoring: ScoringConfig) -> None:
        self._loaded = pickle.dumps((sys.path, entries, int(scoring.memory_gb * 2**30)))
        self._scoring = scoring
        self._names = ", ".join(name for name, _ in entries)
        self.entries = [entry for _, entry in entries]
        arguments = [argument for _, entry in entries for argument in getattr(entry, "kwargs", {}).items()]
        # Variables that arguments name stay visible, as in `token_env: MY_TOKEN`.
        named = {value for name, value in arguments if name.endswith("_env") and isinstance(value, str)}
        self.hidden = hidden_variables(os.environ, {*scoring.secrets, *named})
        self.workers: set[Worker] = set()
        self.interfaces = self._start()

    def _start(self) -> list[Interface]:
        self._control, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path.insert(0, {str(IMPORT_ROOT)!r});"
            " from hybrid_grpo.distributed.workers.forking import serve_forks;"
            f" serve_forks({theirs.fileno()}, {os.getpid()})"
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                # Detached from the terminal: Ctrl-C is meant for the rank, which ends its processes itself.
                start_new_session=True,
                # There are many workers, so numerical libraries get one thread in each.
                env={
                    **{name: value for name, value in os.environ.items() if name not in self.hidden},
                    HIDDEN_VARIABLES: ",".join(self.hidden),
                    "OMP_NUM_THREADS": "1",
                },
            )
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._printers = [
            threading.Thread(target=_forward, args=(stream, descriptor), daemon=True)
            for stream, descriptor in ((process.stdout, 2), (process.stderr, 2))  # 1 is the command's own
        ]
        for printer in self._printers:
            printer.start()
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(self._loaded)
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
                f"{self._names}: importing them takes longer than scoring.max_import_s"
                f" {self._scoring.max_import_s:g}: look for what their modules do outside of functions, or raise it"
            ) from None
        except EOFError:
            raise UserError(
                f"{self._names}: the process that imports them died: import them by hand to see why"
            ) from None
        if "error" in answer:
            raise UserError(answer["error"])
        self._control.settimeout(30.0)
        return [Interface(**interface) for interface in answer["interfaces"]]

    def fork(self, kind: str) -> tuple[int, socket.socket]:
        """Fork a worker of the kind `sync` or `async`. Returns the worker's process id and the socket to it."""
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
        """Kill a worker. Returns its exit status, which is negative for a signal; None if its fork server is gone."""
        try:
            self._control.sendall(f"end {pid}".encode())
            answer = self._answer()
        except (OSError, EOFError):
            self.close()  # a late answer would be mistaken for the answer to another command
            return None
        return None if answer is None else int(answer)

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def close(self) -> None:
        """End the fork server, all workers and all processes that they have started."""
        # Close both: otherwise the socket stays open, and the fork server does not notice.
        self._answers.close()
        self._control.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # it was stopped by other people's code, and does not see the closed socket
            kill([self._process.pid, *descendants(self._process.pid)])
        for printer in self._printers:
            printer.join(0.2)  # for the last output; a process that escaped would keep the streams open
        for worker in self.workers:
            worker.give_up()
        self.workers.clear()


def _forward(stream: IO[bytes], descriptor: int) -> None:
    """Copy a stream to a descriptor until it ends: at most `_MOST_PRINTED` bytes, then a notice if there are more."""
    left = _MOST_PRINTED
    with stream, suppress(OSError):
        while text := os.read(stream.fileno(), 1 << 16):
            shown, left = text[:left], left - len(text[:left])
            if shown and not left:
                notice = (
                    f"\nWARNING: worker processes print more than {_MOST_PRINTED >> 20} MiB: the rest is left out\n"
                )
                shown += notice.encode()
            while shown:
                shown = shown[os.write(descriptor, shown) :]


class Worker:
    """A worker process and the socket to it. This class sends calls, and matches replies to calls.

    Calls are sent on any thread, without a task or a timer for each; replies are read on the loop's thread as they
    arrive. A `sync` worker carries out one call at a time, an `async` worker all calls concurrently.

    Args:
        kind: `sync` or `async`.
        lost: called on the loop's thread when the process ends, or sends something that is not a reply.
    """

    def __init__(
        self, fork_server: ForkServer, loop: asyncio.AbstractEventLoop, kind: str,
        lost: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._fork_server, self._loop, self._lost = fork_server, loop, lost
        self._pid, self._socket = fork_server.fork(kind)
        self._socket.setblocking(False)
        self._calls: dict[int, PendingCall] = {}
        self._waiting: dict[int, Callable[[Reply | None], None]] = {}
        self._received, self._unsent = bytearray(), bytearray()
        self._sending = threading.Lock()
        self.is_gone = False
        """Whether the process was killed, has ended, or has sent something that is not a reply."""
        fork_server.workers.add(self)
        loop.add_reader(self._socket, self._read)

    async def ask(self, index: int, call: Call, timeout_s: float) -> Reply:
        """Call the entry with this index, and wait for the reply. Raises EOFError if the worker is lost before."""
        if self.is_gone:
            raise EOFError
        answer: asyncio.Future[Reply | None] = self._loop.create_future()
        pending = PendingCall.of(self._fork_server.entries[index], index, call, timeout_s)

        def done(reply: Reply | None) -> None:
            if not answer.done():
                answer.set_result(reply)

        self.send(pending, done)
        try:
            reply = await answer
        finally:
            self._calls.pop(pending.number, None)
            self._waiting.pop(pending.number, None)
        if reply is None:
            raise EOFError
        return reply

    def send(self, call: PendingCall, done: Callable[[Reply | None], None]) -> None:
        """Send a call; may be called on any thread. `done` is called once, on the loop's thread, with the reply, or
        with None if the worker is lost. If `is_gone` is true before the call, `done` is never called."""
        self._calls[call.number], self._waiting[call.number] = call, done
        with self._sending:
            sent = 0 if self._unsent else self._try_to_send(call.message)
            rest = call.message[sent:]
            if rest and not self._unsent:
                self._loop.call_soon_threadsafe(self._write)
            self._unsent += rest

    def _try_to_send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except OSError:  # the socket is full, or the process is gone
            return 0

    def _write(self) -> None:
        """Send the rest of long calls as fast as the process reads it. Called on the loop's thread."""
        if self.is_gone:
            return
        with self._sending:
            del self._unsent[: self._try_to_send(self._unsent)]
            if self._unsent:
                self._loop.add_writer(self._socket, self._write)
            else:
                self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        """Read what has arrived: parts of replies, or the end of the stream if the process has ended."""
        replies: list[tuple[int, Reply]] = []
        try:
            part = self._socket.recv(_PART)
            self._received += part
            while (message := unframed(self._received)) is not None:
                if (decoded := decode_reply(message, self._calls)) is not None:
                    replies.append(decoded)
                    del self._calls[decoded[0]]
        except BlockingIOError:
            return
        except (OSError, ValueError):  # not a reply: a function may write to whatever descriptor it finds
            part = b""
        for number, reply in replies:
            if done := self._waiting.pop(number, None):
                done(reply)
        if not part:
            self._lose()

    def give_up(self) -> None:
        """Treat the worker as lost: its calls under way get no reply."""
        self._loop.call_soon(self._lose)

    def _lose(self) -> None:
        if not self.is_gone:
            self._stop()
            if self._lost is not None:
                self._lost()

    def _stop(self) -> None:
        """Stop reading and writing; calls under way get no reply."""
        if self.is_gone:
            return
        self.is_gone = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._calls.clear()
        waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            done(None)

    def end(self) -> int | None:
        """Kill the process; returns its exit status like `ForkServer.end`."""
        self._stop()
        self._fork_server.workers.discard(self)
        status = self._fork_server.end(self._pid)
        self._socket.close()  # not earlier: the process would end by itself, with another status
        return status


def hidden_variables(names: Iterable[str], named: set[str]) -> list[str]:
    """Return the environment variables that look like secrets by their names, without those in `named`."""
    return [name for name in names if name not in named and _VARIABLE.search(name)]
