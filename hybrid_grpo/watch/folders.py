"""Finds the runs to watch, in run folders and in folders that hold run folders, even if a run is added later."""

import itertools
import os
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.watch.watched_run import WatchedRun

_DEPTH = 3
"""Number of levels that a run may be below a named folder."""
_MOST_FOLDERS = 5000
"""Maximum number of folders that are looked into."""


class Folders:
    """All runs in and below the folders that the user named."""

    def __init__(self, named: Sequence[Path]) -> None:
        """Find the runs. Raises UserError if one of `named` is not a folder."""
        for folder in named:
            if not folder.is_dir():
                raise UserError(f"{folder} is not a folder: give the folder of a run, or one that holds some")
        self.named = [str(folder.resolve()) for folder in named]
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
            found = dict.fromkeys(_runs_in(self.named))
            runs = {folder: run for folder, run in self._runs.items() if folder in found}
            names = {run.name for run in runs.values()}
            for folder in found:
                if folder not in runs:
                    name = _unused(folder, names)
                    names.add(name)
                    runs[folder] = WatchedRun(name, folder)
            self._runs = runs
        return self.runs


def _runs_in(named: Sequence[str]) -> list[Path]:
    """Return the folders of runs in and below the named ones, upper levels first, each once however it is reached."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    level = list(named)  # making a Path takes longer than asking whether it is there
    for depth in range(_DEPTH + 1):
        below: list[str] = []
        for folder in level:
            if len(seen) >= _MOST_FOLDERS:
                return found
            try:
                info = os.stat(folder)
            except OSError:
                continue
            if (place := (info.st_dev, info.st_ino)) in seen:
                continue
            seen.add(place)
            # A run that is loading has no metrics yet. Both are also False if the folder may not be entered.
            if os.path.isfile(f"{folder}/metrics.jsonl") or os.path.isfile(f"{folder}/.lock"):
                found.append(Path(folder))
            elif depth < _DEPTH:
                below += _inside(folder)
        level = below
    return found


def _inside(folder: str) -> list[str]:
    try:
        paths = [f"{folder}/{name}" for name in sorted(os.listdir(folder)) if name[0] != "."]
    except OSError:
        return []
    return list(islice(filter(os.path.isdir, paths), _MOST_FOLDERS))


def _unused(folder: Path, names: set[str]) -> str:
    """Return the name of a folder, preceded by as many of its parents as make it unique, or followed by a number."""
    parts = [part.encode(errors="replace").decode() for part in folder.parts[1:] or ("/",)]
    spelled = ("/".join(parts[-length:]) for length in range(1, len(parts) + 1))
    numbered = (f"{'/'.join(parts)} ({number})" for number in itertools.count(2))
    return next(name for name in itertools.chain(spelled, numbered) if name not in names)
