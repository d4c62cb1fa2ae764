"""The process that shows a run on wandb: it follows the files of the run's folder until the run has ended.

`process.py` starts it with the descriptor of an open file that contains its arguments as JSON. A line on standard input
asks it to finish: `ended` if the run succeeded, otherwise `failed`. If the input or rank 0 ends without that line, the
run counts as failed too. If wandb fails or hangs, that is reported in one line, and only this process ends.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from hybrid_grpo.config import LogConfig
from hybrid_grpo.distributed.workers.family import descendants, kill
from hybrid_grpo.records.trackers.steps import TrackedStep, TrackedSteps
from hybrid_grpo.records.trackers.wandb import WandbTracker

LOOK_SECONDS = 0.5
"""Seconds between two checks of the folder."""
LIMIT_SECONDS = 90.0
"""The longest that one action of wandb may take before it counts as hanging."""
FAILED = 3
"""Exit status after a failure that was reported."""
OFF = "WARNING: wandb is off for the rest of this run"


class _Follower:
    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._out, self._err = (os.fdopen(os.dup(number), "w") for number in (1, 2))
        nothing = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):  # wandb prints a lot
            os.dup2(nothing, number)

    def follow(self, folder: Path, log: dict[str, Any], settings: dict[str, Any], done: int) -> NoReturn:
        asked, words = threading.Event(), list[bytes]()
        threading.Thread(target=_listen, args=[asked, words], daemon=True).start()
        parent, config = os.getppid(), LogConfig(**log)
        tracked = TrackedSteps(folder, done, config.histograms_every)
        try:
            with self._within("starting"):
                tracker = WandbTracker(folder, config, settings, done >= 0)
            say(tracker.greeting, self._out)
            while not asked.wait(LOOK_SECONDS) and os.getppid() == parent:
                self._show(tracker, tracked.new())
            self._show(tracker, tracked.new())
            self._show(tracker, tracked.unfinished())
            with self._within("finishing"):
                files = [file for name in ("report.html", "config.yaml") if (file := folder / name).exists()]
                tracker.close(files, failed=words != [b"ended\n"])
        except BaseException as error:
            reason = " ".join(str(error).split())
            self._give_up(f"{type(error).__name__}: {reason[:300]}")
        self._leave(0)

    def _show(self, tracker: WandbTracker, steps: Iterator[TrackedStep]) -> None:
        for step in steps:
            with self._within(f"writing step {step.step}"):
                tracker.write(step)

    @contextmanager
    def _within(self, doing: str) -> Iterator[None]:
        why = f"{doing} did not end within {self._limit_s:g} s"
        timer = threading.Timer(self._limit_s, self._give_up, [why])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, why: str) -> NoReturn:
        say(f"{OFF}: {why}", self._err)
        self._leave(FAILED)

    def _leave(self, status: int) -> NoReturn:
        """Exit without the interpreter's shutdown, during which wandb waits for things that may hang."""
        kill(descendants(os.getpid()))
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
        os._exit(status)


def say(message: str, stream: Any) -> None:
    """Print a message; nothing happens if nobody can read the stream anymore."""
    with suppress(OSError):
        print(message, file=stream, flush=True)


def _listen(asked: threading.Event, words: list[bytes]) -> None:
    words.append(sys.stdin.buffer.readline())
    asked.set()


def main() -> NoReturn:
    # The run decides when this process ends, not a signal to the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # wandb creates a folder for each table and removes it only at the interpreter's shutdown.
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="hybrid_grpo_")
    with open(int(sys.argv[1]), "rb") as file:
        given = json.load(file)
    _Follower(given["limit_s"]).follow(Path(given["folder"]), given["log"], given["settings"], given["done"])


if __name__ == "__main__":
    main()
