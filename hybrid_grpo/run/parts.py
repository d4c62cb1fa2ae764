"""Interfaces of the parts of a checkpoint other than the policy."""

from pathlib import Path
from typing import Any, Protocol

from hybrid_grpo.engine import Engine


class Stateful(Protocol):
    """An object whose state is saved in a checkpoint."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


class Shards(Protocol):
    """Tensors outside the engine, of which every rank writes and reads its own part."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class SavedModel(Shards, Protocol):
    """A model that is trained along with the policy."""

    engine: Engine

    def scale_lr(self, lr_scale: float) -> None: ...
