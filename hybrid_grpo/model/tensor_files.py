"""Files of `torch.save`: a failed write gives its reason, and reading one never runs code, whatever the file holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def write(value: Any, path: str | Path) -> None:
    """Write a file; raises an OSError, or a RuntimeError with one in its chain, where that fails."""
    # Given a path, torch would hide the reason of a failure.
    with open(path, "wb") as file:
        torch.save(value, file)


def read(path: str | Path, trusted: Sequence[Any] = (), map_location: Any = None) -> Any:
    """The value in a file; raises `pickle.UnpicklingError` where it holds types other than tensors, plain values and
    `trusted`."""
    with torch.serialization.safe_globals(list(trusted)):
        return torch.load(path, map_location=map_location, weights_only=True)


def foreign_types(path: str | Path, trusted: Sequence[Any] = ()) -> list[str]:
    """Names in a file that `read` would refuse. Raises ValueError or RuntimeError where it is not a file of torch."""
    with torch.serialization.safe_globals(list(trusted)):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
