"""Keeps the finished completions of steps that no checkpoint covers yet, so that a crash does not lose them.

A step that is repeated after a crash requests completions with the same random streams, whose keys identify them. Those
that are in the journal are reused, and only the others are sampled.
"""

import json
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.data.completion_records import completion_of, record_of
from hybrid_grpo.generation.loop import Stats
from hybrid_grpo.generation.sequence import OnFinish, Request

_FILE = re.compile(r"step_(\d{6,})\.rank_\d+")
Sample = Callable[[list[Request], OnFinish], tuple[list[list[Completion]], Stats]]
"""Completes requests, and calls back for every completion as soon as it is finished."""


class Journal:
    """A folder with one file for each step and rank; this process writes the completions of `rank`.

    Every rank reads the files of all ranks, since a run may resume with another number of ranks. If the folder cannot
    be written to, a warning is given once, and nothing more is kept. Completions belong to the weights that sampled
    them: completions of another identity (see `bind`) are ignored.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self._rank = folder, rank
        self._step: int | None = None
        self._file: Any = None  # of the step and this rank, while it is written
        self._failed = False
        self._known: dict[int, Completion] = {}
        self._identity = 0

    def bind(self, identity: str) -> None:
        """From now on use only completions of this `identity`, which names everything that determines the weights."""
        self._identity, self._step = zlib.crc32(identity.encode()), None

    def complete(
        self, step: int, requests: list[Request], on_finish: OnFinish | None, sample: Sample,
        given: Mapping[int, Completion] | None = None, resumed_from: Mapping[int, Completion] | None = None,
    ) -> tuple[list[list[Completion]], Stats]:  # fmt: skip
        """Do the same as `complete_rest`, but also reuse completions in the journal and write new ones to it."""
        self._turn_to(step)
        with self._opened() as self._file:
            # End the partial line that a killed process may have left.
            self._append("\n")
            known = {**self._known, **(given or {})}
            return complete_rest(requests, known, on_finish, sample, self._write, resumed_from)

    def forget(self, step: int) -> None:
        """Remove the files of all steps up to this one. Call it on one rank, while no other rank is sampling."""
        for path in self.folder.glob("step_*"):
            name = _FILE.fullmatch(path.name)
            if name and int(name[1]) <= step:
                path.unlink()

    def clear(self) -> None:
        """Remove the folder. Call it on one rank, while no other rank is sampling."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _turn_to(self, step: int) -> None:
        if step == self._step:
            return
        self._step = step
        self._known = {
            key: completion
            for path in sorted(self.folder.glob(f"step_{step:06d}.rank_*"))
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
            for key, completion in self._read(line)
        }

    def _opened(self) -> AbstractContextManager[Any]:
        """Open this rank's file of the step, unbuffered: what is written to it outlives this process."""
        try:
            if not self._failed:
                self.folder.mkdir(parents=True, exist_ok=True)
                return (self.folder / f"step_{self._step:06d}.rank_{self._rank}").open("ab", buffering=0)
        except OSError as error:
            self._fail(error)
        return nullcontext()

    def _write(self, key: int, completion: Completion) -> None:
        line = json.dumps({"key": key, **record_of(completion)})
        self._append(f"{self._checksum(line)} {line}\n")

    def _checksum(self, text: str) -> str:
        return f"{zlib.crc32(text.encode(), self._identity):08x}"

    def _read(self, line: str) -> list[tuple[int, Completion]]:
        """Return a line's key and completion in a list, empty if the line is damaged or has another identity."""
        checksum, _, text = line.partition(" ")
        if checksum != self._checksum(text):
            return []
        try:
            row = json.loads(text)
            return [(row["key"], completion_of(row))]
        except (ValueError, KeyError, TypeError, EOFError, RecursionError):
            return []

    def _append(self, text: str) -> None:
        try:
            if self._file is not None:
                self._file.write(text.encode())
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._failed, self._file = True, None
        warnings.warn(f"{self.folder}: finished completions are not kept: {error.strerror}", stacklevel=2)


def complete_rest(
    requests: list[Request], known: Mapping[int, Completion], on_finish: OnFinish | None, sample: Sample,
    keep: Callable[[int, Completion], None] | None = None, resumed_from: Mapping[int, Completion] | None = None,
) -> tuple[list[list[Completion]], Stats]:  # fmt: skip
    """Return the completions of every request, in order. `known` maps keys of random streams to completions that exist
    already; `on_finish` is called for these first. `sample` makes the others; those in `resumed_from` continue after
    their tokens of earlier calls. `keep` is called with the key and the completion as soon as a new one is finished."""
    groups = [[known.get(key) for key in request.keys] for request in requests]
    for index, group in enumerate(groups):
        for k, completion in enumerate(group):
            if completion is not None and on_finish is not None:
                on_finish(index, k, completion)
    places = [(index, [k for k, found in enumerate(group) if found is None]) for index, group in enumerate(groups)]
    places = [(index, missing) for index, missing in places if missing]

    def finished(part: int, number: int, completion: Completion) -> None:
        index, missing = places[part]
        if keep is not None:
            keep(requests[index].keys[missing[number]], completion)
        if on_finish is not None:
            on_finish(index, missing[number], completion)

    made, stats = sample([_part(requests[index], missing, resumed_from or {}) for index, missing in places], finished)
    for (index, missing), completions in zip(places, made, strict=True):
        for k, completion in zip(missing, completions, strict=True):
            groups[index][k] = completion
    return [[completion for completion in group if completion] for group in groups], stats


def _part(request: Request, chosen: list[int], resumed_from: Mapping[int, Completion]) -> Request:
    """Return a request for only the `chosen` completions of another request."""
    limits = request.limits and [request.limits[k] for k in chosen]
    keys = [request.keys[k] for k in chosen]
    return replace(request, keys=keys, limits=limits, resumed_from=[resumed_from.get(key) for key in keys])
