"""A lock around the compilation of DeepSpeed's kernels, which is released even if its process is killed."""

import contextlib
import errno
import fcntl
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from torch.utils import cpp_extension

from hybrid_grpo.config.errors import UserError


@contextlib.contextmanager
def compilation_lock(kernel: str) -> Iterator[None]:
    """A context in which no other hybrid_grpo process compiles this kernel. Raises UserError if compilation fails.

    torch's own lock is a file too: up to 2.13 it waits as long as that exists, later versions lock it and leave it. So
    the owner of this lock removes torch's file, unless a process on this machine has it open.
    """
    folder = Path(cpp_extension._get_build_directory(kernel, verbose=False))
    with (folder / "owner").open("a") as owner:
        _wait_while(lambda: not _locked(owner) or _is_open(folder / "lock"), kernel)
        (folder / "lock").unlink(missing_ok=True)
        compiles, start = not (folder / f"{kernel}.so").exists(), time.monotonic()
        if compiles:
            _say(f"compiling DeepSpeed's kernel {kernel}, once: about a minute")
        try:
            yield
            if compiles:
                _say(f"compiled {kernel} in {time.monotonic() - start:.0f} s")
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            # torch asks the compiler for its version.
            is_compilers = isinstance(error, subprocess.CalledProcessError)
            if not is_compilers and not re.search("Error building extension|ninja", str(error), re.IGNORECASE):
                raise
            raise UserError(
                f"DeepSpeed's kernels cannot be compiled by {os.environ.get('CXX', 'c++')}:"
                f" {str(error).splitlines()[0]}: install a compiler (apt install g++), or name one in CXX"
            ) from error


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


def _is_open(path: Path) -> bool:
    """Whether a process of this user on this machine has a file open."""
    if path.exists():
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if os.path.samefile(link, path):
                    return True
    return False


def _say(text: str) -> None:
    print(f"hybrid-grpo: {text}", file=sys.stderr, flush=True)  # standard output is for results


def _wait_while(busy: Callable[[], bool], kernel: str) -> None:
    """Wait while another process compiles a kernel, or loads it, which takes less than 30 s; then print a line."""
    start, printed = time.monotonic(), False
    while busy():
        if not printed and time.monotonic() - start > 30:
            _say(f"another process is compiling DeepSpeed's kernel {kernel}: waiting")
            printed = True
        time.sleep(0.1)
