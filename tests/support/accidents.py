"""`python accidents.py STAGE STEP RANK ACCIDENT train ...`: a run in which something happens to one rank in a stage."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable

from hybrid_grpo import __main__ as command_line
from hybrid_grpo.run.stopping import progress as progresses

BUSY = "import time\nwhile True: time.sleep(1)"


def loop(work: Callable[[], object] = lambda: None) -> None:
    while True:
        work()


def raise_error() -> None:
    raise RuntimeError("an accident")


def leave_a_session() -> None:
    """A process in a session of its own, which knows nothing of the rank."""
    if not os.fork():
        os.setsid()
        os.execve(sys.executable, [sys.executable, "-S", "-c", BUSY, os.environ["MARK"]], {})


ACCIDENTS = {
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGUSR1 to the watcher": lambda: os.kill(os.getppid(), signal.SIGUSR1),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "SIGINT twice": lambda: [os.kill(os.getpid(), signal.SIGINT) or time.sleep(0.1) for _ in range(2)],
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGKILL of the watcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGSTOP of the watcher": lambda: [os.kill(pid, signal.SIGSTOP) for pid in (os.getppid(), os.getpid())],
    "loop in Python": loop,
    # It holds the lock of the interpreter, for longer than any test.
    "loop in C": lambda: loop(lambda: re.match("(a+)+$", "a" * 64 + "b")),
    "raise": raise_error,
    "exit": lambda: os._exit(3),
    "SIGTERM and loop": lambda: [os.kill(os.getpid(), signal.SIGTERM), loop()],
}


def main() -> None:
    stage, step, rank, accident, *arguments = sys.argv[1:]
    enter = progresses.Progress.enter
    left = [ACCIDENTS[accident]]
    if os.environ.get("RANK", "0") != rank:
        left = []

    def entered(self: progresses.Progress, name: str, number: int | None = None) -> None:
        before = self._step if number is None else number
        if left and (name, str(before)) == (stage, step):
            self._shared.enter(name, before)
            if "MARK" in os.environ and len(left) == 1:
                leave_a_session()
            left.pop(0)()
        enter(self, name, number)

    progresses.Progress.enter = entered
    sys.argv = ["hybrid_grpo", *arguments]
    command_line.entry()


if __name__ == "__main__":
    main()
