"""The processes that call reward callees. processes.py starts them, and talks to them over sockets.

A *fork server* imports the callees of a run once, says what their signatures are, and forks a *worker* whenever it
is asked to: a new worker is there in milliseconds, whatever the callees import. A worker calls callees with the
arguments that come over its socket until the socket closes, or until it is killed with all that it has started. It
does not outlive the fork server, and the fork server does not outlive the rank. Neither needs torch.

Calls are pickled; replies are JSON, so that nothing that a worker sends is run in the rank.
"""

import asyncio
import ctypes
import gc
import io
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
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.user_code import describe
from hybrid_grpo.workers.calls import Call, Callee, Failure, Reply, failed
from hybrid_grpo.workers.replies import encode_reply

_HEADER = struct.Struct(">I")
"""Length of the message that follows; the frames of multiprocessing's Connection, up to 2 GiB."""
_LARGEST_REPLY = 1 << 28
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def framed(message: bytes) -> bytes:
    """A message as it is sent."""
    return _HEADER.pack(len(message)) + message


def unframed(received: bytearray) -> bytes | None:
    """Take the first message out of what was received; None where it is not complete. Raises EOFError where it is
    longer than a reply may be."""
    if len(received) < _HEADER.size:
        return None
    (size,) = _HEADER.unpack_from(received)
    if size > _LARGEST_REPLY:
        raise EOFError(f"a message of {size} bytes")
    end = _HEADER.size + size
    if len(received) < end:
        return None
    message = bytes(received[_HEADER.size : end])
    del received[:end]
    return message


async def read_frame(reader: asyncio.StreamReader, largest: int = _LARGEST_REPLY) -> bytes:
    """The next message, of at most `largest` bytes; raises EOFError or OSError where the other side sends none."""
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if size > largest:
        raise EOFError(f"a message of {size} bytes")
    return await reader.readexactly(size)


def serve_forks(descriptor: int, rank: int) -> None:
    """Main function of the fork server: import, describe, then fork and kill on demand.

    The descriptor is that of the socket to the process `rank`. What to import comes on standard input.
    """
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    # While the process imports it does not look at the socket, and so does not see that the rank is gone.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != rank:  # it ended before that
        return
    path, entries, memory_bytes = pickle.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:] = path
    if isinstance(sys.stdout, io.TextIOWrapper):  # workers end without emptying buffers
        sys.stdout.reconfigure(line_buffering=True)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        callees = [entry.load(name) for name, entry in entries]
    except UserError as error:
        return _tell(control, {"error": str(error)})
    except BaseException as error:  # above all a module that ends the process while it is imported
        return _tell(control, {"error": f"rewards: importing them raised {describe(error, None)}"})
    _prctl(_PR_SET_PDEATHSIG, 0)
    _tell(control, {"interfaces": [vars(callee.interface) for callee in callees]})
    # All objects of this moment are shared with every worker.
    gc.collect()
    gc.freeze()
    workers: set[int] = set()
    helpers = set(_children(os.getpid()))  # processes that a module has started
    try:
        while True:
            command, descriptors, _, _ = socket.recv_fds(control, 64, 1)
            if not command:
                return
            what, _, argument = command.decode().partition(" ")
            if what == "fork":
                with socket.socket(fileno=descriptors[0]) as connection:
                    connection.set_inheritable(False)  # a program that outlives the worker would keep it open
                    pid = _fork(connection, control, callees, memory_bytes, argument)
                workers.add(pid)
                _tell(control, pid)
            else:
                pid = int(argument)
                status = _end(pid) if pid in workers else None  # None: a worker of a fork server that was killed
                workers.discard(pid)
                _end_orphans(workers | helpers)
                _tell(control, status)
    finally:
        _kill(_descendants(os.getpid()))


def _tell(control: socket.socket, answer: Any) -> None:
    control.sendall(json.dumps(answer).encode() + b"\n")


def _fork(
    connection: socket.socket,
    control: socket.socket,
    callees: Sequence[Callee],
    memory_bytes: int,
    kind: str,
) -> int:
    with warnings.catch_warnings():
        # Python warns of forking where a module has started threads.
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
            asyncio.run(_work_async(connection, callees))
        else:
            _work(connection, callees)
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
    """Kill the processes that dead workers have left: they are children of the fork server now."""
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
    """Children of a process, by the kernel's own list where it has one: psutil takes milliseconds."""
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
    """Set up a new worker: it dies with its parent, has a process group of its own, becomes the parent of processes
    that the programs it starts leave behind, and has its limits."""
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = Path("/proc/self/status").read_text()
    here = int(status.split("VmData:")[1].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (here + memory_bytes, here + memory_bytes))
    # Workers must not draw the same random numbers.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _work(connection: socket.socket, callees: Sequence[Callee]) -> None:
    frames = Connection(connection.detach())
    with suppress(EOFError):
        while True:
            number, index, call, _ = pickle.loads(frames.recv_bytes())
            reply = callees[index].reply(call)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the function forgot would end the next call
            frames.send_bytes(encode_reply(number, reply))


async def _work_async(connection: socket.socket, callees: Sequence[Callee]) -> None:
    """Calls overlap: each is a task of this loop."""
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, index: int, call: Call, timeout_s: float) -> None:
        try:
            reply = await asyncio.wait_for(callees[index].reply_async(call), timeout_s)
        except asyncio.TimeoutError:
            reply = timed_out(timeout_s, len(call.expected))
        writer.write(framed(encode_reply(number, reply)))

    with suppress(asyncio.IncompleteReadError):
        while True:
            task = asyncio.create_task(answer(*pickle.loads(await read_frame(reader, sys.maxsize))))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


def timed_out(timeout_s: float, rows: int) -> Reply:
    """The reply for a call that took too long."""
    return failed(Failure("timeout", f"took longer than its timeout_s, {timeout_s:g}"), rows)


def died(status: int | None, rows: int) -> Reply:
    """The reply for a call whose process has ended, with this exit status where it is known."""
    if status is None:
        how = ""
    elif status == -9:
        how = " (killed: by the system for its memory, by itself, or for closing its socket)"
    else:
        how = f" (exit status {status})" if status >= 0 else f" (signal {-status})"
    return failed(Failure("died", f"ended its process{how}"), rows)
