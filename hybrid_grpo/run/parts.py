"""Interfaces of the parts of a checkpoint other than the policy."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
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


class SideModel(Shards, Protocol):
    """Weights that a feature keeps beside the policy's, such as their average. A checkpoint holds them in shards."""

    def checkpoint_bytes(self, weights: int) -> int:
        """Return the bytes of the shards over all ranks, if the policy trains `weights` weights."""

    @property
    def exports(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        """More models to export: maps the name of a model's folder, `model_...`, to a function that makes a context
        manager, within which the policy has the weights of that model."""
        return {}
