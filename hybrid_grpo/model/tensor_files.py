"""Reads and writes `torch.save` files. A failed write reports its reason, and reading never runs code from the file."""

from pathlib import Path
from typing import Any

import torch


def write(value: Any, path: Path) -> None:
    """Write a file; a failure raises an OSError, or a RuntimeError with one in its chain."""
    # Given a path, torch would hide the reason of a failure.
    with open(path, "wb") as file:
        torch.save(value, file)


def read(path: Path) -> Any:
    """Return the value in a file, whose tensors are read when they are used. Raises `pickle.UnpicklingError` if the
    file holds more than tensors and plain values."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def foreign_types(path: Path) -> list[str]:
    """List the types in a file that `read` would refuse. Raises ValueError or RuntimeError if it is not torch's."""
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
