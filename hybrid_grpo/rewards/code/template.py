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
import stat
import sys
import tempfile
import time
import traceback
import uuid
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
_WATCH_S = 0.005
"""Seconds between two checks of a program's folder."""


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
    try:
        template.serve()
    finally:
        remove(template.folder)


class SandboxTemplate:
    """Runs one program at a time in a folder that is emptied after each."""

    def __init__(self, control: socket.socket, without: list[str]) -> None:
        self.folder = _new_folder(os.path.join(tempfile.gettempdir(), f"hybrid-grpo-sandbox-{os.getuid()}"))
        self._control = control
        self._containment = Containment(self.folder, without)
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
            # After the reply, as it may take long: a program may leave thousands of nested folders.
            empty(self.folder)

    def _run(self, limits: Limits, judged: bool, files: list[int]) -> dict[str, Any] | None:
        deadline = time.monotonic() + limits.timeout_s
        writing = limits.disk_mb > 0 and self._containment.writable
        family: list[int] = []
        fork = partial(self._fork, family, limits)
        try:
            source, *others = files
            if judged:
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    # Neither has standard streams: those of the template lead nowhere.
                    fork([0, 1, 1, *others, theirs.fileno()], False, lambda: judge(_read(3), 4, Connection(5)))
                    fork([0, 1, 1, source, ours.fileno()], writing, lambda: serve_program(_read(3), Connection(4)))
            else:
                fork([*others, source], writing, lambda: run_program(_read(3), "__main__"))
            end = self._watch(family, deadline, limits, writing)
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

    def _fork(
        self, family: list[int], limits: Limits, files: list[int], writing: bool, main: Callable[[], object]
    ) -> None:
        """Fork a process that inherits only `files`, renumbered from 0. Contain the process, and let it run `main`.

        Its id is appended to `family`. Raises NotContained, before `main` runs, if the process cannot be contained.
        """
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
            place = self.folder if writing else "/"
            os.environ["HOME"] = os.environ["TMPDIR"] = place
            tempfile.tempdir = None  # forget the template's
            os.chdir(place)
            tell = len(files) - 1
            try:
                self._containment.enter(limits, writing=writing)
                assert os.getppid() == template, "the template is gone"
            except BaseException as error:
                os.write(tell, f"{type(error).__name__}: {error}".encode())
                os._exit(1)
            os.write(tell, _CONTAINED)
            os.closerange(tell, 1 << 20)
            _main(main)
        finally:
            os._exit(1)

    def _watch(self, family: list[int], deadline: float, limits: Limits, writing: bool) -> str:
        """Wait until the first process exits or has to be ended; return why: exited, timeout, disk, or caller gone."""
        first, control, hidden = os.pidfd_open(family[0]), self._control.fileno(), set[int]()
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                wait_s = min(left_s, _WATCH_S) if writing else left_s
                ready, _, _ = select.select([first, control], [], [], wait_s)
                if ready:
                    return "gone" if control in ready else "exited"
                if writing:
                    overfull, now = _look(self.folder, family[-1], limits)
                    # Twice in a row: a file may have been closed during the check.
                    if overfull or hidden & now:
                        return "disk"
                    hidden = now
            return "timeout"
        finally:
            os.close(first)


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


def _new_folder(parent: str) -> str:
    """Make a folder in `parent`, and remove from `parent` the folders that killed templates left behind."""
    with suppress(FileExistsError):
        os.mkdir(parent, 0o711)
    state = os.lstat(parent)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        return tempfile.mkdtemp(prefix="program-")  # the name belongs to another user
    os.chmod(parent, 0o711)
    lock = _locked(parent, fcntl.LOCK_EX)
    try:
        for name in os.listdir(parent):
            with suppress(OSError):
                os.close(_locked(os.path.join(parent, name), fcntl.LOCK_EX | fcntl.LOCK_NB))
                remove(os.path.join(parent, name))
        folder = tempfile.mkdtemp(dir=parent)
        _locked(folder, fcntl.LOCK_EX)  # until this process ends
        return folder
    finally:
        os.close(lock)


def _locked(folder: str, how: int) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _look(folder: str, pid: int, limits: Limits) -> tuple[bool, set[int]]:
    """Return whether a program exceeds its folder's limits (deleted files that it holds open count as well), and
    the inodes of deleted files that it has only mapped: their size cannot be seen without privileges."""
    count, size, hidden = 0, 0, _mapped(folder, pid)
    with suppress(OSError):
        for file in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                held = os.stat(f"/proc/{pid}/fd/{file}")
                hidden.discard(held.st_ino)
                size += held.st_blocks * 512 if held.st_nlink == 0 and held.st_dev == os.stat(folder).st_dev else 0
    folders = [folder]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                count += 1
                size += entry.stat(follow_symlinks=False).st_blocks * 512
                hidden.discard(entry.inode())
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                if count > limits.files or size > limits.disk_mb << 20:
                    return True, hidden
    return size > limits.disk_mb << 20, hidden


def _mapped(folder: str, pid: int) -> set[int]:
    """Inodes of the deleted files of a folder that a process has mapped."""
    lines, begin = [], f"{folder}/".encode()
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        # Address, rights, offset, device, inode, path.
        lines = [line.split(maxsplit=5) for line in file.read().splitlines() if line.endswith(b" (deleted)")]
    return {int(line[4]) for line in lines if line[5].startswith(begin)}


def empty(folder: str) -> None:
    """Remove everything in a folder, including folders of any depth and folders without access rights."""
    while names := os.listdir(folder):
        for path in (os.path.join(folder, name) for name in names):
            if not _is_folder(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            # Contents move up a level, so that no path gets too long for the system.
            for inner in os.listdir(path):
                if _is_folder(os.path.join(path, inner)):
                    os.chmod(os.path.join(path, inner), 0o700)
                os.rename(os.path.join(path, inner), os.path.join(folder, uuid.uuid4().hex))
            os.rmdir(path)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def remove(folder: str) -> None:
    empty(folder)
    os.rmdir(folder)


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
