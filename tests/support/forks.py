"""Programs in processes of their own, forked from one process that has already imported what they need.

A new interpreter spends some six seconds of processor time on importing torch, transformers and DeepSpeed; a fork has
them at once. But for what preloaded.py does, a program starts as if it were alone: nothing has run in the process that
is forked.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

from paths import ROOT, SUPPORT

from hybrid_grpo.run.local_ranks import free_port

# Some of these are read when a module is imported, so they hold for every program.
_ENVIRONMENT = {
    **{"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    # The compiler of torch would keep threads and processes ready, and a process with threads cannot safely be forked.
    "TORCH_WARM_POOL": "0",
}
_context = multiprocessing.get_context("forkserver")
_starting = threading.Lock()
_SECONDS_TO_FOLLOW = 10.0
"""For the other ranks to end by themselves once one has failed."""


@dataclass(frozen=True)
class Done:
    """A program that has ended: its exit status, its output, and how long it took."""

    status: int
    out: str
    err: str
    seconds: float


def run(
    *arguments: str | Path, world: int = 1, cwd: Path | None = None, environment: Mapping[str, str] | None = None,
    timeout: float = 240.0,
) -> Done:  # fmt: skip
    """Run `python ARGUMENTS` (a script, or -m and a module) as `world` ranks; the status is that of the first to fail.

    With one rank the program is not told of any; the output of several is one after the other.
    """
    start = time.monotonic()
    with Ranks(*arguments, world=world, cwd=cwd, environment=environment) as ranks:
        status = ranks.wait(timeout)
    return Done(status, *ranks.output, time.monotonic() - start)


class Ranks:
    """`python ARGUMENTS` as `world` ranks that run; those that still do are killed when the block is left.

    Attributes:
        processes: one for each rank.
        port: of their rendezvous.
        output: what all have written, to standard output and to standard error, one rank after the other; there when
            the block has been left.
    """

    def __init__(
        self, *arguments: str | Path, world: int = 1, cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        path = list(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables |= {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}
        self.port = free_port()
        shared = {"WORLD_SIZE": str(world), "LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [
            (Path(self._folder.name, f"{rank}.out"), Path(self._folder.name, f"{rank}.err")) for rank in range(world)
        ]
        self.processes: list[BaseProcess] = []
        self.output = ("", "")
        for rank in range(world):
            of_rank = {"MASTER_PORT": self.port, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            told = {**variables, **({**shared, **of_rank} if world > 1 else {}), **(environment or {})}
            streams = (Path(os.devnull), *self._outputs[rank])
            self.processes.append(start([str(a) for a in arguments], cwd or Path.cwd(), told, streams))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        with self._folder:
            out, err = self.so_far()
        self.output = (out, err)

    def statuses(self) -> list[int | None]:
        """Exit status of every rank, once all have ended."""
        for process in self.processes:
            process.join(10)
        return [process.exitcode for process in self.processes]

    def so_far(self) -> tuple[str, str]:
        """What all have written until now, as in `output`."""
        streams = [[path for path in paths if path.exists()] for paths in zip(*self._outputs, strict=True)]
        out, err = ("".join(path.read_text(errors="replace") for path in paths) for paths in streams)
        return out, err

    def wait(self, timeout: float) -> int:
        """Wait until all have ended, or a while after one has failed; the status of the first to fail."""
        status, deadline = 0, time.monotonic() + timeout
        running = list(self.processes)
        while running and time.monotonic() < deadline:
            wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic()))
            for process in [process for process in running if process.exitcode is not None]:
                running.remove(process)
                if process.exitcode and not status:
                    status, deadline = process.exitcode, min(deadline, time.monotonic() + _SECONDS_TO_FOLLOW)
        if running and not status:
            raise TimeoutError(f"{len(running)} of {len(self.processes)} processes have not ended in time")
        return status


def start(
    arguments: list[str], cwd: Path, environment: dict[str, str], streams: Sequence[Path], executable: str | None = None
) -> BaseProcess:
    """A fork that is `python ARGUMENTS`.

    Args:
        arguments: a script, -m and a module, or -c and a program, and what they are told.
        cwd: working folder.
        environment: all of its variables.
        streams: three files, which are its standard input, output and error.
        executable: what it takes for its interpreter. Default: that of the tests.
    """
    path = list(filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), str(SUPPORT)]))
    imports = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}
    with _starting, mock.patch.dict(os.environ, imports):
        _context.set_forkserver_preload(["preloaded"])
        forkserver.ensure_running()
    process = _context.Process(target=_main, args=(arguments, cwd, environment, streams, executable or sys.executable))
    process.start()
    return process


def _main(
    arguments: list[str], cwd: Path, environment: dict[str, str], streams: Sequence[Path], executable: str
) -> None:
    """Be the program: called in the fork."""
    assert sys.modules.pop("preloaded"), "all that takes long has been imported"
    sys.path.remove(str(SUPPORT))
    # DeepSpeed collects garbage when it starts, which would look at all that was imported.
    gc.freeze()
    os.setpgid(0, 0)
    # It is ignored where the tests were started in the background of a script, and that is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate(streams):
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        # A pipe without anyone at its other end would not be opened.
        descriptor = os.open(path, how | os.O_NONBLOCK)
        os.set_blocking(descriptor, True)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # until the process ends
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.executable = executable
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, "")
        sys.modules.pop(f"{arguments[1]}.__main__", None)  # runpy warns of one that the caller has imported
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        folder = Path(arguments[0]).parent
        # Programs beside a feature's tests use those of this folder.
        sys.path[:0] = [str(folder), *([str(SUPPORT)] if ROOT / "tests/features" in folder.parents else [])]
        runpy.run_path(arguments[0], run_name="__main__")
