"""The processes that call reward functions: started by pool.py, and talked to over sockets.

A *fork server* imports the functions of a run once, says what their signatures are, and forks a *worker* whenever it is
asked to: a new worker is there in milliseconds, whatever the functions import. A worker calls functions with what comes
over its socket until the socket closes, or until it is killed with everything it has started. It does not outlive the
fork_server, and the fork server does not outlive the rank. None of them needs torch.

Requests are pickled; replies are JSON, so that nothing of a worker is run in the rank.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.importing import describe
from hybrid_grpo.rewards.functions import Failure, Function, Reply, RewardCall, failed, load_function

HEADER = struct.Struct(">I")
"""Length of the message that follows."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def send(connection: socket.socket, message: bytes) -> None:
    """Send a message whole."""
    connection.sendall(HEADER.pack(len(message)) + message)


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None where the other side is gone."""
    header = _exactly(connection, HEADER.size)
    return None if header is None else _exactly(connection, HEADER.unpack(header)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def encode_reply(number: int, reply: Reply) -> bytes:
    """A reply as a message."""
    failures = {row: vars(failure) for row, failure in enumerate(reply.failures) if failure is not None}
    return json.dumps([number, reply.values, failures, reply.extra, reply.spent, reply.whole]).encode()


def decode_reply(message: bytes) -> tuple[int, Reply]:
    """The number of the request, and the reply to it."""
    number, values, failures, extra, spent, whole = json.loads(message)
    known = {int(row): Failure(**failure) for row, failure in failures.items()}
    # Steps are pairs.
    values = [[(end, reward) for end, reward in v] if isinstance(v, list) else v for v in values]
    return number, Reply(values, [known.get(row) for row in range(len(values))], extra, spent, whole)


def serve_forks(descriptor: int) -> None:
    """Main of the fork_server: import, describe, then fork and kill on demand.

    Args:
        descriptor: of the socket to the rank. What to import comes on standard input.
    """
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    # While it imports it does not see that the rank is gone.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    path, entries, memory_bytes = pickle.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:] = path
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        functions = [load_function(config, entry) for entry, config in entries]
    except UserError as error:
        send(control, json.dumps({"error": str(error)}).encode())
        return
    except BaseException as error:  # a module that ends the process while it is imported, above all
        send(control, json.dumps({"error": f"rewards: importing them raised {describe(error, None)}"}).encode())
        return
    _prctl(_PR_SET_PDEATHSIG, 0)
    send(control, json.dumps({"interfaces": [vars(function.interface) for function in functions]}).encode())
    # What is there now is shared with every worker.
    gc.collect()
    gc.freeze()
    workers: set[int] = set()
    helpers = set(_children(os.getpid()))  # that a module has started
    try:
        while True:
            command, descriptors, _, _ = socket.recv_fds(control, 64, 1)
            if not command:
                return
            what, _, argument = command.decode().partition(" ")
            if what == "fork":
                connection = socket.socket(fileno=descriptors[0])
                connection.set_inheritable(False)  # a program that outlives the worker would keep it open
                pid = _fork(connection, control, functions, memory_bytes, argument)
                connection.close()
                workers.add(pid)
                send(control, json.dumps(pid).encode())
            else:
                pid = int(argument)
                status = _end(pid) if pid in workers else None  # it was of a fork server that was killed
                workers.discard(pid)
                _end_orphans(workers | helpers)
                send(control, json.dumps(status).encode())
    finally:
        _kill(_descendants(os.getpid()))


def _fork(
    connection: socket.socket, control: socket.socket, functions: list[Function], memory_bytes: int, kind: str
) -> int:
    with warnings.catch_warnings():
        # A module may have started threads when it was imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        with suppress(OSError):  # the worker has done it
            os.setpgid(pid, pid)
        return pid
    status = 1
    try:
        control.close()
        _settle(memory_bytes)
        if kind == "async":
            asyncio.run(_work_async(connection, functions))
        else:
            _work(connection, functions)
        status = 0
    finally:
        os._exit(status)


def _end(pid: int) -> int:
    """Kill a worker and what it has started; its exit status, negative for the signal that ended it."""
    family = [pid, *_descendants(pid)]
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    _kill(family)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end_orphans(ours: set[int]) -> None:
    """Kill what dead workers have left: the fork server has inherited it."""
    while orphans := [child for child in _children(os.getpid()) if child not in ours]:
        _kill(orphans)
        for orphan in orphans:
            with suppress(ChildProcessError):
                os.waitpid(orphan, 0)


def _kill(processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    """Of one process. The kernel's own list, where there is one: to look through all processes takes milliseconds."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        if lists:
            return [int(child) for children in lists for child in children.split()]
        return [child.pid for child in psutil.Process(pid).children()]
    except (OSError, psutil.NoSuchProcess):
        return []


def _descendants(pid: int) -> list[int]:
    children = _children(pid)
    return children + [descendant for child in children for descendant in _descendants(child)]


def _settle(memory_bytes: int) -> None:
    """What a new worker does first: it dies with its parent, is a group of its own, inherits what the programs that it
    starts leave, and has its limits."""
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the limit is not on mapped memory, or not kept at all
        status = Path("/proc/self/status").read_text()
        here = int(status.split("VmData:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (here + memory_bytes, here + memory_bytes))
    # Workers must not draw the same random numbers.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _work(connection: socket.socket, functions: list[Function]) -> None:
    while (message := receive(connection)) is not None:
        number, index, request, _ = _read(message)
        reply = functions[index].score(request)
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that was forgotten would end the next call
        send(connection, encode_reply(number, reply))


async def _work_async(connection: socket.socket, functions: list[Function]) -> None:
    """Calls overlap: each is a task of this loop."""
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, index: int, request: RewardCall, timeout_s: float) -> None:
        try:
            reply = await asyncio.wait_for(functions[index].score_async(request), timeout_s)
        except asyncio.TimeoutError:
            reply = timed_out(timeout_s, len(request.lengths))
        message = encode_reply(number, reply)
        writer.write(HEADER.pack(len(message)) + message)

    with suppress(asyncio.IncompleteReadError):
        while True:
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            task = asyncio.create_task(answer(*_read(await reader.readexactly(size))))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def _read(message: bytes) -> tuple[int, int, RewardCall, float]:
    number, index, request, timeout_s = pickle.loads(message)
    return number, index, request, timeout_s


def timed_out(timeout_s: float, rows: int) -> Reply:
    """The reply for a call that took too long."""
    return failed(Failure("timeout", f"took longer than its timeout_s, {timeout_s:g}"), rows)


def entries_message(entries: list[tuple[str, Any]], memory_bytes: int) -> bytes:
    """What a fork server reads first: where to import from, the entries of `rewards` by name, and the limit."""
    return pickle.dumps((sys.path, entries, memory_bytes))
