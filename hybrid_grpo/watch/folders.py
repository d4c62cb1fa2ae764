"""Finds the runs to watch, in run folders and in folders that hold run folders, even if a run is added later."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.watch.watched_run import WatchedRun

_DEPTH = 3
"""Number of levels that a run may be below a named folder."""


class Folders:
    """All runs in and below the folders that the user named."""

    def __init__(self, named: Sequence[Path]) -> None:
        """Find the runs. Raises UserError if one of `named` is not a folder."""
        for folder in named:
            if not folder.is_dir():
                raise UserError(f"{folder} is not a folder: give the folder of a run, or one that holds some")
        self._named = [folder.resolve() for folder in named]
        self._runs: dict[Path, WatchedRun] = {}
        self._looking = threading.Lock()
        self.look()

    @property
    def runs(self) -> dict[str, WatchedRun]:
        """The runs by name, as of the last `look`."""
        return {run.name: run for run in self._runs.values()}

    def look(self) -> dict[str, WatchedRun]:
        """Look for runs that were added or removed, and return all runs by name."""
        with self._looking:
            found = dict.fromkeys(run for folder in self._named for run in _runs_in(folder, _DEPTH))
            runs = {folder: run for folder, run in self._runs.items() if folder in found}
            names = {run.name for run in runs.values()}
            for folder in found:
                if folder not in runs:
                    name = _unused(folder, names)
                    names.add(name)
                    runs[folder] = WatchedRun(name, folder)
            self._runs = runs
        return self.runs


def _runs_in(folder: Path, depth: int) -> list[Path]:
    # A run that is loading has no metrics yet. Both are also False if the folder may not be entered.
    if os.path.isfile(folder / "metrics.jsonl") or os.path.isfile(folder / ".lock"):
        return [folder]
    if not depth:
        return []
    try:
        inside = sorted(path for path in folder.iterdir() if os.path.isdir(path) and not path.name.startswith("."))
    except OSError:
        return []
    return [run for path in inside for run in _runs_in(path, depth - 1)]


def _unused(folder: Path, names: set[str]) -> str:
    """Return the name of a folder, preceded by as many of its parents as make it unique."""
    parts = [part.encode(errors="replace").decode() for part in folder.parts[1:] or ("/",)]
    spelled = ("/".join(parts[-length:]) for length in range(1, len(parts) + 1))
    return next(name for name in spelled if name not in names)
