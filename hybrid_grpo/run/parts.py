"""Interfaces of the parts of a checkpoint other than the policy."""

from pathlib import Path
from typing import Any, Protocol


class Stateful(Protocol):
    """An object whose state is saved in a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class Shards(Protocol):
    """Tensors outside the engine, of which every rank writes and reads its own part."""

    def save(self, folder: Path) -> None:
        """Write this rank's part into the folder of a checkpoint."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on any number of ranks; raises UserError if nothing was saved. Collective."""
