"""The processes that call other people's code; processes.py is the rank's side of them.

A *fork server* loads the entries of a run once, reports their interfaces, and forks a *worker* whenever it is asked to:
a new worker is ready in milliseconds, whatever the entries import. A worker carries out the calls that come over its
socket until the socket closes, or until it is killed with all that it has started. No worker outlives the fork server,
and the fork server does not outlive the rank. Neither needs torch.
"""

import asyncio
import gc
import io
import json
import os
import pickle
import random
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.user_code import describe
from hybrid_grpo.distributed.workers.calls import Call, Callee, timed_out
from hybrid_grpo.distributed.workers.family import adopt_orphans, children, descendants, die_with_parent, kill
from hybrid_grpo.distributed.workers.messages import encode_reply, framed, read_frame


def serve_forks(descriptor: int, rank: int) -> None:
    """Main function of the fork server: load entries, report their interfaces, then fork and kill workers on demand.

    `descriptor` is the socket to the rank, whose process id is `rank`. The entries are read from standard input.
    """
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    # While it imports, this process does not read the socket, and so does not notice that the rank is gone.
    die_with_parent()
    if os.getppid() != rank:  # it ended before that
        return
    path, entries, memory_bytes = pickle.load(sys.stdin.buffer)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:] = path
    if isinstance(sys.stdout, io.TextIOWrapper):  # workers end without flushing their buffers
        sys.stdout.reconfigure(line_buffering=True)
    adopt_orphans()
    names = ", ".join(name for name, _ in entries)
    try:
        callees = [entry.load(name) for name, entry in entries]
    except UserError as error:
        return _tell(control, {"error": str(error)})
    except BaseException as error:  # above all a module that ends the process while it is imported
        return _tell(control, {"error": f"{names}: importing them raised {describe(error, None)}"})
    die_with_parent(False)
    _tell(control, {"interfaces": [vars(callee.interface) for callee in callees]})
    # All objects that exist now are shared with every worker.
    gc.collect()
    gc.freeze()
    workers: set[int] = set()
    helpers = set(children(os.getpid()))  # processes that a module has started
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
                status = _end(pid) if pid in workers else None  # None: a worker of an earlier fork server
                workers.discard(pid)
                _end_orphans(workers | helpers)
                _tell(control, status)
    finally:
        kill(descendants(os.getpid()))


def _tell(control: socket.socket, answer: Any) -> None:
    control.sendall(json.dumps(answer).encode() + b"\n")


def _fork(
    connection: socket.socket, control: socket.socket, callees: Sequence[Callee], memory_bytes: int, kind: str
) -> int:
    # Python warns about forking if a module has started threads.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        pid = os.fork()
    if pid:
        with suppress(OSError):  # the worker has already done it
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
    """Kill a worker and every process it started. Returns its exit status, or minus the signal that ended it."""
    family = [pid, *descendants(pid)]
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    kill(family)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _end_orphans(ours: set[int]) -> None:
    """Kill the processes that dead workers left behind, which are now children of the fork server."""
    while orphans := [child for child in children(os.getpid()) if child not in ours]:
        kill(orphans)
        for orphan in orphans:
            with suppress(ChildProcessError):
                os.waitpid(orphan, 0)


def _settle(memory_bytes: int) -> None:
    """Set up a new worker: it dies with its parent, has its own process group, adopts the orphans of programs that it
    starts, and cannot use more than `memory_bytes` of additional memory."""
    os.setpgid(0, 0)
    die_with_parent()
    adopt_orphans()
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


def _work(connection: socket.socket, callees: Sequence[Callee]) -> None:
    frames = Connection(connection.detach())
    with suppress(EOFError):
        while True:
            number, index, call, _ = pickle.loads(frames.recv_bytes())
            reply = callees[index].reply(call)
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the function forgot would end the next call
            frames.send_bytes(encode_reply(number, reply))


async def _work_async(connection: socket.socket, callees: Sequence[Callee]) -> None:
    """Carry out calls as they arrive; calls may overlap, since each is a task of this event loop."""
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, index: int, call: Call, timeout_s: float) -> None:
        try:
            reply = await asyncio.wait_for(callees[index].reply_async(call), timeout_s)
        except TimeoutError:
            reply = timed_out(timeout_s, len(call.expected))
        writer.write(framed(encode_reply(number, reply)))

    with suppress(asyncio.IncompleteReadError):
        while True:
            task = asyncio.create_task(answer(*pickle.loads(await read_frame(reader))))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
