"""Fills the silences of a start: what takes longer than a few seconds is named in a line."""

import os
import threading
from contextlib import suppress

IMPORTING = "importing torch, transformers and DeepSpeed"
_SILENT_SECONDS = 3.0


class Doing:
    """A context in which rank 0 prints what it is doing once that has taken seconds; a call begins something else."""

    def __init__(self, what: str) -> None:
        self._timer: threading.Timer | None = None
        self(what)

    def __call__(self, what: str) -> None:
        self.end()
        self._timer = threading.Timer(_SILENT_SECONDS, _print, [f"hybrid-grpo: {what}"])
        self._timer.daemon = True
        if os.environ.get("RANK", "0") == "0":
            self._timer.start()

    def __enter__(self) -> "Doing":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Print nothing more."""
        if self._timer is not None:
            self._timer.cancel()


def _print(line: str) -> None:
    with suppress(OSError):
        print(line, flush=True)
