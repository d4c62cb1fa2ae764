"""Writes a checkpoint in a thread of every rank, next to whatever the ranks do meanwhile.

Threads do not communicate by collectives, which belong to the main threads. When a rank's files are on disk, its thread
leaves a note of their sizes and checksums next to them; when rank 0's thread has the notes of all ranks, all files are
whole, and it publishes the checkpoint. So a checkpoint becomes visible as soon as it is written, wherever the run is.
"""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from hybrid_grpo.distributed.ranks import rank, world_size
from hybrid_grpo.distributed.tensor_files import Postponed, settle
from hybrid_grpo.records.files import replace_text, sync
from hybrid_grpo.run.saving.manifest import measure

Files = dict[str, list[int]]
"""Size in bytes and CRC-32 of files, by their path in the checkpoint; see `Manifest.files`."""
_LOOK_S, _PATIENCE_S = 0.02, 10.0


class Writing:
    """A checkpoint that threads write to the folder `draft`: this rank's writes `files`, from a `copy` of their tensors
    or from the tensors themselves. Notes go to the folder `notes`. On rank 0, `publish` is then called with the facts
    about the files of all ranks.

    Attributes:
        step: the step of the checkpoint.
        written: done when this rank's files are on disk, or cannot be written.
        published: done when the thread has ended; on rank 0, with the checkpoint in place.
        seconds: how long the thread took; 0 until it has ended.
    """

    def __init__(
        self, step: int, files: Postponed, draft: Path, notes: Path, publish: Callable[[Files], None], *, copy: bool
    ) -> None:
        self.step, self.seconds = step, 0.0
        self.written, self.published = Future[None](), Future[None]()
        self._files, self._draft, self._notes, self._publish, self._copies = files, draft, notes, publish, copy
        self._rank, self._world, self._abandoned = rank(), world_size(), threading.Event()
        if copy:
            files.copy_later()
        on_gpu = any(tensor.is_cuda for tensor in files.tensors)
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()
        if copy and on_gpu:
            # Fast, and so no thread uses the GPU beside the main thread.
            settle()

    def abandon(self) -> None:
        """End the thread, which may be waiting for a rank that has failed."""
        self._abandoned.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until this rank's files are on disk, and a while for those of the others, which may have ended."""
        wait([self.written])
        wait([self.published], _PATIENCE_S)

    def _run(self) -> None:
        start = time.monotonic()
        try:
            self._write()
        except BaseException as error:
            self.written.set_exception(error)
            self.published.set_exception(error)
            return
        self.written.set_result(None)
        try:
            if self._rank == 0:
                self._publish(self._all_files())
            self.seconds = time.monotonic() - start
            self.published.set_result(None)
        except BaseException as error:
            self.published.set_exception(error)

    def _write(self) -> None:
        if self._copies:
            self._files.copy()
        facts = {str(path.relative_to(self._draft)): _synced(path) for path in self._files.write_all()}
        replace_text(self._notes / f"{self._rank:05d}.json", json.dumps(facts))

    def _all_files(self) -> Files:
        while len(notes := sorted(self._notes.glob("*.json"))) < self._world:
            if self._abandoned.wait(_LOOK_S):
                raise RuntimeError("another rank could not write its files")
        files: Files = {}
        for note in notes:
            files |= json.loads(note.read_bytes())
        # Parts of a checkpoint that wrote files of their own have done so before any thread began.
        own = (path for path in sorted(self._draft.rglob("*")) if path.is_file())
        names = [name for path in own if (name := str(path.relative_to(self._draft))) not in files]
        return files | {name: _synced(self._draft / name) for name in names}


def _synced(path: Path) -> list[int]:
    """Flush a file to disk, and return its size and CRC-32."""
    sync(path)
    return measure(path)
