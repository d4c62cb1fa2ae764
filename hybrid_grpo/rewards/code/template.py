"""The template process of a sandbox: forks programs, watches them and ends them.

It has already imported the modules that programs often need, so a fork is ready in a millisecond. Programs, tests and
outputs are open files, which it passes on without reading them. It serves one request at a time, and ends when the
process that started it does. It uses the standard library only, since it runs without site-packages.
"""

import fcntl
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from hybrid_grpo.rewards.code.containment import Containment, Limits
from hybrid_grpo.rewards.code.judge import judge, run_program, serve_program

MODULES = (
    "abc array bisect cmath collections.abc copy dataclasses datetime decimal enum fractions functools heapq io"
    " itertools json math operator queue random re statistics string sys textwrap time typing"
)
"""Modules imported before the first fork, and shared by all programs."""
_CONTAINED = b"contained"


def main() -> None:
    """Serve requests until the other end of the socket is closed.

    The command line has the parent folder of this package, the descriptor of a socket that preserves message
    boundaries, and the argument `without` of `Containment`. A request is JSON with `limits` and `judged`. Open files
    come with it: source, input, output and error output or, if `judged` is true, source, tests and verdict.
    """
    _, _, descriptor, *without = sys.argv
    # A program finds neither this package nor these arguments.
    del sys.path[0]
    sys.argv[:] = ["program"]
    control = socket.socket(fileno=int(descriptor))
    for module in MODULES.split():
        importlib.import_module(module)
    warnings.simplefilter("ignore")
    template = SandboxTemplate(control, without)
    gc.collect()
    gc.freeze()
    template.serve()


class SandboxTemplate:
    """Runs one program at a time."""

    def __init__(self, control: socket.socket, without: list[str]) -> None:
        self._control = control
        self._containment = Containment(without)
        control.send(json.dumps({"protections": self._containment.protections}).encode())

    def serve(self) -> None:
        while True:
            message, files, _, _ = socket.recv_fds(self._control, 1 << 16, 8)
            if not message:
                return
            request = json.loads(message)
            try:
                reply = self._run(Limits(**request["limits"]), request["judged"], files)
            finally:
                for file in files:
                    os.close(file)
            if reply is None:
                return
            self._control.send(json.dumps(reply).encode())

    def _run(self, limits: Limits, judged: bool, files: list[int]) -> dict[str, Any] | None:
        deadline = time.monotonic() + limits.timeout_s
        family: list[int] = []
        fork = partial(self._fork, family, limits)
        try:
            source, *others = files
            if judged:
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    # Neither has standard streams: those of the template lead nowhere.
                    fork([0, 1, 1, *others, theirs.fileno()], lambda: judge(_read(3), 4, Connection(5)))
                    fork([0, 1, 1, source, ours.fileno()], lambda: serve_program(_read(3), Connection(4)))
            else:
                fork([*others, source], lambda: run_program(_read(3), "__main__"))
            end = self._watch(family[0], deadline)
        except NotContained as error:
            return {"error": str(error)}
        finally:
            statuses = [_end(pid) for pid in family]
            if not self._containment.seccomp:
                _end_descendants()
        if end == "gone":
            return None
        if end == "exited" and statuses[0] < 0:
            end = signal.Signals(-statuses[0]).name
        return {"end": end, "status": statuses[0]}

    def _fork(self, family: list[int], limits: Limits, files: list[int], main: Callable[[], object]) -> None:
        """Fork a process that inherits only `files`, renumbered from 0. Contain the process, and let it run `main`. Its
        id is appended to `family`. Raises NotContained, before `main` runs, if the process cannot be contained."""
        template = os.getpid()
        ready, tell = os.pipe()
        pid = os.fork()
        if pid:
            family.append(pid)
            os.close(tell)
            with open(ready, "rb") as pipe:
                report = pipe.read()
            if report != _CONTAINED:
                raise NotContained(report.decode() or "a process died before it was contained")
            return
        try:
            os.setsid()
            files = [*files, tell]
            for number, file in enumerate([fcntl.fcntl(file, fcntl.F_DUPFD, 100) for file in files]):
                os.dup2(file, number)
            os.environ["HOME"] = os.environ["TMPDIR"] = "/"
            os.chdir("/")
            tell = len(files) - 1
            try:
                self._containment.enter(limits)
                assert os.getppid() == template, "the template is gone"
            except BaseException as error:
                os.write(tell, f"{type(error).__name__}: {error}".encode())
                os._exit(1)
            os.write(tell, _CONTAINED)
            os.closerange(tell, 1 << 20)
            _main(main)
        finally:
            os._exit(1)

    def _watch(self, pid: int, deadline: float) -> str:
        """Wait until a process exits or has to be ended; return why: exited, timeout, or caller gone."""
        process, control = os.pidfd_open(pid), self._control.fileno()
        try:
            ready, _, _ = select.select([process, control], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(process)
        return "timeout" if not ready else "gone" if control in ready else "exited"


class NotContained(Exception):
    """A protection has stopped working."""


def _end(pid: int) -> int:
    """Kill a process and its process group; returns its exit status, negative for a signal."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _main(main: Callable[[], object]) -> None:
    """Run `main`, and exit with the status with which Python would end such a program."""
    random.seed(0)  # Python reseeds it in every fork
    status: Any = 0
    try:
        main()
    except SystemExit as error:
        status = error.code
        if isinstance(status, str):
            sys.stderr.write(status)
        status = status if isinstance(status, int) else int(status is not None)
    except BaseException:
        traceback.print_exc(limit=-1)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(status & 0xFF)


def _read(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8", errors="surrogatepass") as file:
        return file.read()


def _end_descendants() -> None:
    """Kill the processes that a program has left behind, which are or become children of this process."""
    while True:
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    os.kill(int(name), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
