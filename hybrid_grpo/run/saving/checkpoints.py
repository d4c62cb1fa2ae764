"""Writes and restores the checkpoints of a run, each of which is complete or absent.

Every rank writes to a draft. When all files are on disk, rank 0 adds the manifest, and a single rename makes the
checkpoint visible. After that, the oldest ones are removed. The folder must be on storage that all ranks share.
"""

import math
import pickle
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hybrid_grpo.distributed.ranks import all_gather_objects, all_reduce, barrier, from_first_rank, rank, world_size
from hybrid_grpo.distributed.tensor_files import Postponed, foreign_types
from hybrid_grpo.engine import Engine, OffloadedModel
from hybrid_grpo.records.files import replace_text, sync
from hybrid_grpo.records.write_failures import WriteFailed, write_together
from hybrid_grpo.run.fingerprints import Fingerprints
from hybrid_grpo.run.saving.manifest import Damaged, Manifest
from hybrid_grpo.run.saving.space import has_memory
from hybrid_grpo.run.saving.writing import Files, Writing

_TAG = re.compile(r"step_\d{6,}")
_DRAFT = ".draft_"
Shards = OffloadedModel | None
"""A second model in a checkpoint, of which every rank writes its own part; None if there is none."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found complete and undamaged."""

    folder: Path
    manifest: Manifest


class Checkpoints:
    """The folder `checkpoints/` of a run, in which the newest `keep` checkpoints are kept. Their manifests store the
    run's `settings`, and `inputs`, the fingerprints of what the run reads. `rollbacks` counts its rollbacks."""

    def __init__(self, folder: Path, keep: int, settings: dict[str, Any] | None = None) -> None:
        self.folder, self._keep, self._settings = folder, keep, settings or {}
        self.inputs: dict[str, str] = {}
        self.rollbacks = 0
        self._writing: Writing | None = None
        """The checkpoint that was begun and is not finished."""
        self._verified_run = ""
        """Identity of the run according to its checkpoints, in case the file `run_id` is gone."""

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """Continue the count of rollbacks from a checkpoint of this run."""
        self.rollbacks = checkpoint.manifest.rollbacks

    def fingerprint(self, read: Fingerprints) -> None:
        """Replace `inputs` by what rank 0 reads now. Collective."""
        self.inputs = from_first_rank(read() if rank() == 0 else {})

    def tags(self) -> list[str]:
        """Return the names of all checkpoints, damaged ones included, the newest first."""
        found = [path.name for path in self.folder.glob("step_*") if _TAG.fullmatch(path.name)]
        return sorted(found, key=_step, reverse=True)

    def newest_whole(self, before: float = math.inf) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest whole checkpoint before a step, or None, and what is wrong with newer ones. Collective."""
        passed_over: list[str] = []
        for tag in all_gather_objects([tag for tag in self.tags() if _step(tag) < before])[0]:
            try:
                return self.verify(self.folder / tag), passed_over
            except Damaged as damage:
                passed_over.append(f"{tag}: {damage}")
        return None, passed_over

    def verify(self, folder: Path) -> Checkpoint:
        """Return the checkpoint in `folder`, without loading it. Raise Damaged on all ranks if it is incomplete or
        damaged, or lies in this folder but belongs to another run. Collective; every rank reads its share of files."""
        manifest, verdict, is_own = None, "", folder.parent == self.folder
        try:
            manifest = Manifest.read(folder)
            if is_own and manifest.run != (self._run() or manifest.run):
                raise Damaged("it belongs to another run")
            for path in manifest.check(folder, rank(), world_size()):
                _refuse_code(path)
        except Damaged as damage:
            verdict = str(damage)
        if verdict := next(filter(None, all_gather_objects(verdict)), ""):
            raise Damaged(verdict)
        assert manifest is not None
        if is_own:
            self._verified_run = manifest.run
        return Checkpoint(folder, manifest)

    def save(self, engine: Engine, step: int, state: dict[str, Any], shards: Shards = None) -> None:
        """Write the checkpoint of `step`; `state` and `shards` are this rank's own. If it cannot be written, raise
        WriteFailed on all ranks; earlier checkpoints then remain as they were. Collective."""
        self.begin(engine, step, state, shards)
        self.finish()

    def begin(
        self, engine: Engine, step: int, state: dict[str, Any], shards: Shards = None, *, copy: bool = False
    ) -> bool:
        """Begin to write a checkpoint in a thread, which `finish` waits for; see `save`. With `copy` the run may
        continue meanwhile: a copy is written. Return False, having begun nothing, if a rank lacks the memory for it."""
        tag, files = f"step_{step:06d}", Postponed()
        draft, notes = self.folder / f"{_DRAFT}{tag}", self.folder / f"{_DRAFT}notes"

        def collect() -> bool:
            # One key for our state: the engine stores its own keys next to it.
            with files.collecting():
                engine.save(self.folder, draft.name, {"hybrid_grpo": {"step": step, **state}})
                if shards is not None:
                    shards.save(draft)
            return not copy or has_memory(sum(tensor.nbytes for tensor in files.tensors))

        with self._cleared_on_failure(tag):
            run = write_together(lambda: self._begin(draft, notes), self.folder)[0]
            if not all(write_together(collect, self.folder)):
                return False
        manifest = Manifest(run, step, world_size(), engine.stage, self._settings, {}, self.inputs, self.rollbacks)

        def publish(files: Files) -> None:
            self._publish(replace(manifest, files=files), draft, tag)

        self._writing = Writing(step, files, draft, notes, publish, copy=copy)
        return True

    def is_ready(self, device: torch.device) -> bool:
        """Return whether `finish` would not wait: the checkpoint is in place, or a rank has failed. Collective."""
        assert self._writing is not None
        written, published = self._writing.written, self._writing.published
        fails = written.done() and written.exception() is not None
        busy, failed = all_reduce(torch.tensor([not published.done(), fails], device=device).float(), "max").tolist()
        return bool(failed or not busy)

    def finish(self) -> float:
        """Wait until the checkpoint that was begun is in place, and return the seconds that writing it took. If it
        cannot be written, raise WriteFailed on all ranks. Collective."""
        writing, self._writing = self._writing, None
        assert writing is not None, "no checkpoint is being written"
        with self._cleared_on_failure(f"step_{writing.step:06d}"):
            try:
                write_together(writing.written.result, self.folder)
                write_together(writing.published.result, self.folder)
            except WriteFailed:
                writing.abandon()
                raise
        return writing.seconds

    def leave(self) -> None:
        """Wait for the checkpoint that was begun, if any, although the run ends by an error. Not collective."""
        if self._writing is not None:
            self._writing.wait()

    @contextmanager
    def _cleared_on_failure(self, tag: str) -> Iterator[None]:
        try:
            yield
        except WriteFailed as failure:
            if rank() == 0:
                self._clear_drafts()
            barrier()
            raise WriteFailed(f"checkpoint {self.folder / tag} could not be written: {failure}") from failure

    def _begin(self, draft: Path, notes: Path) -> str:
        if rank() != 0:
            return ""
        self._clear_drafts()
        draft.mkdir(parents=True)
        notes.mkdir()
        if not self._run():
            replace_text(self.folder / "run_id", self._verified_run or secrets.token_hex(8))
        return self._run()

    def _publish(self, manifest: Manifest, draft: Path, tag: str) -> None:
        """Make a draft whose files are on disk a checkpoint, and remove the oldest. For rank 0."""
        manifest.write(draft)
        # Only the directory entries of the files are left.
        for path in [*draft.rglob("*"), draft]:
            if path.is_dir():
                sync(path)
        self._remove(tag)
        draft.rename(self.folder / tag)
        sync(self.folder)
        # Later ones belong to a timeline that this run has abandoned.
        kept = [old for old in self.tags() if _step(old) <= manifest.step][: self._keep]
        for old in set(self.tags()) - set(kept):
            self._remove(old)
        self._clear_drafts()

    def load(self, engine: Engine, checkpoint: Checkpoint) -> dict[str, Any]:
        """Restore the engine from a checkpoint that `verify` returned, and return this rank's state. Collective."""
        return dict(engine.load(checkpoint.folder.parent, checkpoint.folder.name)["hybrid_grpo"])

    def roll_back(self, checkpoint: Checkpoint, lr_scale: float, note: str) -> Checkpoint:
        """Abandon everything after a checkpoint, record the reason and the learning-rate factor from there on in its
        manifest, and return the updated checkpoint. On failure, raise WriteFailed on all ranks. Collective."""
        self.rollbacks += 1
        manifest = replace(checkpoint.manifest, rollbacks=self.rollbacks, lr_scale=lr_scale, note=note)
        write_together(lambda: manifest.write(checkpoint.folder) if rank() == 0 else None, self.folder)
        # A run that is killed before this repeats the steps that led to the roll-back, and rolls back again.
        self.forget_after(manifest.step)
        return Checkpoint(checkpoint.folder, manifest)

    def forget_after(self, step: int) -> None:
        if rank() == 0:
            for tag in self.tags():
                if _step(tag) > step:
                    self._remove(tag)
            self._clear_drafts()
        barrier()

    def _run(self) -> str:
        """Return the identity of the run; empty if there is none yet, or its file is damaged."""
        path = self.folder / "run_id"
        text = path.read_text(errors="replace") if path.is_file() else ""
        return text if re.fullmatch("[0-9a-f]{16}", text) else ""

    def _remove(self, tag: str) -> None:
        """Rename a checkpoint to a draft, to be deleted later: a half-deleted one must not look like a checkpoint."""
        if (self.folder / tag).exists():
            (self.folder / tag).rename(self.folder / f"{_DRAFT}removed_{tag}")

    def _clear_drafts(self) -> None:
        for path in self.folder.glob(f"{_DRAFT}*"):
            shutil.rmtree(path, ignore_errors=True)


def _step(tag: str) -> int:
    return int(tag.removeprefix("step_"))


def _refuse_code(path: Path) -> None:
    """Raise Damaged if a file holds more than data, since loading it could run code."""
    if path.suffix != ".pt":
        return
    try:
        foreign = foreign_types(path)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise Damaged(f"{path.name} is not a file of torch.save") from error
    if foreign:
        raise Damaged(f"{path.name} holds {', '.join(foreign)}, which is code and not data: it is not loaded")
