"""Checkpoints of a run: written whole, then named in `latest`, then the old ones pruned.

`latest` is replaced only when every rank's files are on disk, so a run killed at any moment resumes from the
last complete checkpoint.
"""

import re
import shutil
from pathlib import Path
from typing import Any, Protocol

from hybrid_grpo.distributed import barrier, rank
from hybrid_grpo.engine import Engine
from hybrid_grpo.run.files import replace_text

_TAG = re.compile(r"step_\d{6,}")


class Shards(Protocol):
    """Tensors that are not the engine's; every rank writes and reads its own part of them."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def latest(self) -> str | None:
        """Tag of the newest complete checkpoint."""
        pointer = self.folder / "latest"
        return pointer.read_text().strip() if pointer.is_file() else None

    def save(self, engine: Engine, step: int, state: dict[str, Any], shards: Shards | None = None) -> None:
        """Write the checkpoint of `step`; `state` and `shards` are this rank's own. Collective."""
        tag = f"step_{step:06d}"
        if rank() == 0:
            # A run that was killed while it wrote may have left a part of one.
            shutil.rmtree(self.folder / tag, ignore_errors=True)
        barrier()
        # One key for our state: the engine stores its own keys beside it.
        engine.save(self.folder, tag, {"hybrid_grpo": {"step": step, **state}})
        if shards is not None:
            shards.save(self.folder / tag)
        barrier()
        if rank() == 0:
            replace_text(self.folder / "latest", tag)
            self._prune(tag)
        barrier()

    def load(self, engine: Engine, shards: Shards | None = None) -> dict[str, Any] | None:
        """Restore the newest complete checkpoint; this rank's state, or None where there is none. Collective."""
        tag = self.latest()
        if tag is None:
            return None
        state = dict(engine.load(self.folder, tag)["hybrid_grpo"])
        if shards is not None:
            shards.load(self.folder / tag)
        return state

    def _prune(self, newest: str) -> None:
        tags = [path.name for path in self.folder.iterdir() if _TAG.fullmatch(path.name)]
        tags.sort(key=lambda tag: int(tag.removeprefix("step_")))
        for tag in tags[: -self.keep]:
            if tag != newest:
                shutil.rmtree(self.folder / tag)
