"""Reads and writes `torch.save` files. A failed write reports its reason, and reading never runs code from the file.

Files can be postponed, so that a thread writes them while their tensors continue to change. It writes from a copy,
which it makes itself unless the tensors are on a GPU. Whoever is about to change tensors of a checkpoint calls `settle`
first.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PIECE_BYTES = 64 << 20
"""Size of the pinned buffer through which tensors leave a GPU."""
copying: list[threading.Event] = []
"""One for each `Postponed` that a thread is to copy; set when it has."""
_collecting = threading.local()
"""Attribute `files`: where `write` puts files in this thread."""


class Postponed:
    """Files that are written later than their `write` is called: in the order of the calls, by `write_all`."""

    def __init__(self) -> None:
        self._files: list[tuple[Any, Path]] = []
        self._copied = threading.Event()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A context in which `write` only adds a file. Its value must not change, except for tensors."""
        _collecting.files = self._files
        try:
            yield
        finally:
            del _collecting.files

    @property
    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for value, _ in self._files:
            _mapped(value, found.append)
        return found

    def copy_later(self) -> None:
        """Let `settle` wait until `copy` has been called, in another thread."""
        copying.append(self._copied)

    def copy(self) -> None:
        """Replace all tensors by copies in host memory."""
        try:
            self._files = [(_mapped(value, to_host), path) for value, path in self._files]
        finally:
            copying.remove(self._copied)
            self._copied.set()

    def write_all(self) -> Iterator[Path]:
        """Write the files, and yield the path of each. Their memory is freed one by one."""
        while self._files:
            value, path = self._files.pop(0)
            write(value, path)
            del value
            yield path


def settle() -> None:
    """Wait until no thread copies tensors any more: those of a checkpoint may then change."""
    for copied in list(copying):
        copied.wait()


def write(value: Any, path: Path) -> None:
    """Write a file, unless it is postponed. Of each tensor only its elements are written, not the rest of the memory
    that it is in. A failure raises an OSError, or a RuntimeError with one in its chain."""
    if hasattr(_collecting, "files"):
        _collecting.files.append((value, path))
        return
    # Given a path, torch would hide the reason of a failure.
    with open(path, "wb") as file:
        torch.save(_mapped(value, _alone), file)


def read(path: Path) -> Any:
    """Return the value in a file, whose tensors are read when they are used. Raises `pickle.UnpicklingError` if the
    file holds more than tensors and plain values."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def foreign_types(path: Path) -> list[str]:
    """List the types in a file that `read` would refuse. Raises ValueError or RuntimeError if it is not torch's."""
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory. What is on a GPU passes through a pinned buffer: to pin memory for all
    of it would take as long as to copy it."""
    tensor = tensor.detach()
    host = torch.empty(tensor.shape, dtype=tensor.dtype)
    if not tensor.is_cuda:
        return host.copy_(tensor)
    with torch.cuda.device(tensor.device):
        count = min(tensor.numel(), _PIECE_BYTES // tensor.element_size())
        pass_through(torch.empty(max(1, count), dtype=tensor.dtype, pin_memory=True), tensor, host)
    return host


def pass_through(buffer: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy a tensor to another one in pieces, each of which is in the buffer on its way."""
    count = len(buffer)
    for part, place in zip(source.reshape(-1).split(count), target.view(-1).split(count), strict=True):
        place.copy_(buffer[: len(part)].copy_(part))


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return plain data with `change` applied to its tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _alone(tensor: Tensor) -> Tensor:
    # Otherwise DeepSpeed's attributes, and the rest of the memory that the tensor is in, would be written too.
    tensor = tensor.detach()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.to("cpu", copy=True)
