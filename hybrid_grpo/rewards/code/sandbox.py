"""Runs untrusted programs.

    with Sandbox() as sandbox:
        sandbox.run("print(input()[::-1])", "abc", Limits(timeout_s=2.0)).stdout  # "cba\n"

Each program runs in a process that is forked from a small template process (template.py), so it has none of the
caller's memory, files or environment. The process gives up its rights before the program's first line runs
(containment.py). It is killed when its time is up, or when the caller or the template ends. This module needs only the
standard library, and Linux; `python -m hybrid_grpo.rewards.code.sandbox` prints the protections of this machine.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hybrid_grpo.rewards.code.containment import PROTECTIONS, Limits

_ROOT = str(Path(__file__).resolve().parents[3])
_START = "import sys; sys.path[0] = sys.argv[1]; from hybrid_grpo.rewards.code.template import main; main()"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONIOENCODING": "utf-8:backslashreplace",
    # The same program has the same output every time.
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_SLACK_S = 30.0
"""Seconds beyond a program's time limit after which the template counts as failed; it usually needs milliseconds."""
_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class ProgramResult:
    end: str
    """`exited`, `timeout`, or the name of the signal that ended it."""
    status: int
    """Exit status, negative for a signal."""
    stdout: str
    stderr: str
    """At most `Limits.output_kb`, like `stdout`."""


class Sandbox:
    """A template process; programs run in forks of it, one at a time. It belongs to the process and thread that made
    it. Raises ValueError if this is not Linux, and RuntimeError if the template does not start."""

    def __init__(self, without: Iterable[str] = ()) -> None:
        if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
            raise ValueError(
                f"programs are run in a sandbox that needs Linux 5.3 or later, and this is {sys.platform}:"
                " train on Linux, or in a container"
            )
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-s", "-S", "-c", _START, _ROOT, str(theirs.fileno()), *without]
        library_path = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
        self._process = subprocess.Popen(
            command, env=_ENVIRONMENT | library_path, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._owner = os.getpid()
        self.protections: dict[str, str] = self._receive(_SLACK_S)["protections"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.close()
        if os.getpid() == self._owner:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_SLACK_S)
            self._process.kill()
            self._process.wait()
            assert self._process.stderr is not None
            self._process.stderr.close()

    def __del__(self) -> None:
        # Nothing more: a copy in a forked process must not wait for its parent's child.
        if hasattr(self, "_control"):
            self._control.close()

    @property
    def usable(self) -> bool:
        """Whether this process made the sandbox, and the template is alive."""
        return os.getpid() == self._owner and self._control.fileno() >= 0 and self._process.poll() is None

    def require(self, names: Collection[str]) -> None:
        """Raise ValueError unless these PROTECTIONS exist and are in force."""
        for name in names:
            if name not in PROTECTIONS:
                raise ValueError(f"require {name!r} is not a protection: there are {', '.join(PROTECTIONS)}")
            if name not in self.protections:
                raise ValueError(
                    f"require {name}: this machine cannot promise that {PROTECTIONS[name]}: it needs a kernel with"
                    " Landlock (Linux 5.13), and one and a container that allow seccomp filters, on x86-64 or arm64;"
                    f" or leave {name} out of `require`"
                )

    def describe(self) -> str:
        """One line about which protections are in force and which are not."""
        held = ", ".join(f"{name} ({how})" for name, how in self.protections.items())
        missing = ", ".join(name for name in PROTECTIONS if name not in self.protections)
        return f"sandbox: {held or 'nothing'}" + (f"; NOT IN FORCE: {missing}" if missing else "")

    def run(self, source: str, stdin: str = "", limits: Limits = _DEFAULT_LIMITS) -> ProgramResult:
        """Run Python source like `python program.py`; raises RuntimeError if the sandbox itself fails."""
        with _files(source, stdin, "", "") as files:
            reply = self._request(files, limits, judged=False)
            written = [os.pread(file, limits.output_kb << 10, 0).decode("utf-8", "replace") for file in files[2:]]
        return ProgramResult(reply["end"], reply["status"], *written)

    def test(self, source: str, tests: str, limits: Limits = _DEFAULT_LIMITS) -> list[bool]:
        """Run `tests` (see `judge.judge`) against a program, in two processes, each under `limits`. Returns one bool
        per test, up to the last test that was reached: whether it passed. Raises errors like `run`."""
        with _files(source, tests, "") as files:
            self._request(files, limits, judged=True)
            return [letter == ord("1") for letter in os.pread(files[2], 1 << 20, 0)]

    def _request(self, files: list[int], limits: Limits, *, judged: bool) -> dict[str, Any]:
        request = {"limits": asdict(limits), "judged": judged}
        with suppress(BrokenPipeError, ConnectionResetError):  # `_receive` says why
            socket.send_fds(self._control, [json.dumps(request).encode()], files)
        reply = self._receive(limits.timeout_s + _SLACK_S)
        if "error" in reply:
            raise RuntimeError(f"the sandbox cannot contain programs: {reply['error']}")
        return reply

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        try:
            message = self._control.recv(1 << 16)
        except (TimeoutError, ConnectionResetError):
            message = b""
        if not message:
            self._control.close()
            self._process.kill()
            errors = self._process.communicate()[1].decode(errors="replace").strip().splitlines()
            raise RuntimeError(f"the sandbox has ended: {errors[-1] if errors else 'it was killed, or hung'}")
        return json.loads(message)


@contextmanager
def _files(*texts: str) -> Iterator[list[int]]:
    """Yield the descriptors of in-memory files that contain these texts."""
    with ExitStack() as stack:
        numbers = []
        for text in texts:
            file = stack.enter_context(os.fdopen(os.memfd_create("program"), "w+b"))
            file.write(text.encode("utf-8", "surrogatepass"))
            file.seek(0)
            numbers.append(file.fileno())
        yield numbers


if __name__ == "__main__":
    with Sandbox() as _sandbox:
        print(_sandbox.describe())
