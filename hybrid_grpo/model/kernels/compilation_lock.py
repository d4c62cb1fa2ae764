"""A lock around the compilation of DeepSpeed's kernels, which is released even if its process is killed."""

import contextlib
import errno
import fcntl
import functools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from torch.utils import cpp_extension

from hybrid_grpo.config.errors import UserError

_COMPILE_SECONDS = 600
"""Longer than any kernel takes to compile; the slowest, CPUAdam, took 225 s on two busy cores."""
_LEAVES_LOCKS = hasattr(cpp_extension, "FileBaton")
"""Whether this torch locks by the existence of a file. Since 2.15 it locks the file itself, and never removes it."""


@contextlib.contextmanager
def compilation_lock(kernel: str) -> Iterator[None]:
    """A context in which no other hybrid_grpo process compiles this kernel. Raises UserError if compilation fails.

    Before 2.15, torch's own lock is the existence of a file: a killed process leaves it behind, and torch would wait
    forever. The owner of this lock removes the file that was left behind.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR", cpp_extension.get_default_build_root()))
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{kernel}.owner").open("a+") as owner:
        _wait_while(lambda: not _locked(owner), kernel)
        owner.seek(0)
        if _LEAVES_LOCKS:
            locks = functools.partial(root.glob, f"**/{kernel}/lock")
            if not owner.read():
                _wait_while(lambda: any(_age(path) < _COMPILE_SECONDS for path in locks()), kernel)
            for path in locks():
                path.unlink(missing_ok=True)
        owner.write(str(os.getpid()))
        owner.flush()
        compiles, start = not any(root.glob(f"**/{kernel}/{kernel}.so")), time.monotonic()
        if compiles:
            print(f"hybrid-grpo: compiling DeepSpeed's kernel {kernel}, once: about a minute", flush=True)
        try:
            yield
            if compiles:
                print(f"hybrid-grpo: compiled {kernel} in {time.monotonic() - start:.0f} s", flush=True)
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            asked = isinstance(error, subprocess.CalledProcessError)  # the compiler, for its version
            if not asked and not re.search("Error building extension|ninja", str(error), re.IGNORECASE):
                raise
            compiler, why = os.environ.get("CXX", "c++"), str(error).splitlines()[0]
            if shutil.which(compiler) is None:
                why = f"there is no C++ compiler {compiler}"
            elif asked:
                why = f"{compiler} is not a C++ compiler that works"
            raise UserError(
                f"DeepSpeed's kernels cannot be compiled: {why}: install one (apt install g++) or name it in CXX"
            ) from error
        finally:
            owner.truncate(0)


def one_at_a_time(compile_and_load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap DeepSpeed's function that compiles a kernel in `compilation_lock`."""
    if hasattr(compile_and_load, "__wrapped__"):
        return compile_and_load

    @functools.wraps(compile_and_load)
    def guarded(builder: Any, *args: Any, **kwargs: Any) -> Any:
        with compilation_lock(builder.name):
            return compile_and_load(builder, *args, **kwargs)

    return guarded


def _locked(file: TextIO) -> bool:
    """Try to lock a file; False if another process has locked it. Succeeds on file systems without locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _age(path: Path) -> float:
    """Seconds since a file was written; infinite once it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _wait_while(busy: Callable[[], bool], kernel: str) -> None:
    """Wait while another process compiles a kernel; print a line after five seconds."""
    start, printed = time.monotonic(), False
    while busy():
        if not printed and time.monotonic() - start > 5:
            print(f"hybrid-grpo: another process is compiling DeepSpeed's kernel {kernel}: waiting", flush=True)
            printed = True
        time.sleep(0.1)
