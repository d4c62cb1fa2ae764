"""Counts the bytes of live tensors."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all live storages except those of `known` tensors, and their peak since the last `mark`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._seen:
                self._seen.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, key, size)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size

    def mark(self) -> int:
        """Return the peak since the last mark, and set a new mark."""
        peak, self.peak = self.peak, self.live
        return peak
