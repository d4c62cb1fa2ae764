"""A double of the host's waits for a GPU: it notes every operation that would wait if its tensors were on one.

Such are reads of a value (`item`, `bool`, `tolist`), results whose size depends on values (`nonzero`, a mask as an
index), and numbers of the host that become a tensor in any other way than by `upload`, which copies from pinned memory.
"""

import sys
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_READS = ("_local_scalar_dense", "equal", "is_nonzero")
_SIZES = ("nonzero", "masked_select", "masked_scatter_backward", "_unique2", "unique_consecutive", "bincount")
_FROM_HOST = ("lift_fresh",)
"""What torch.tensor, torch.from_numpy and a list as an index call."""
_INDEXING = ("index", "index_put", "index_put_", "_unsafe_index")
_MASKS = (torch.bool, torch.uint8)
_ALLOWED = ("doubles/gpu_attention.py", "hybrid_grpo/model/upload.py")


class HostWaits(TorchDispatchMode):
    """Inside, `seen` grows by the name and the place of every operation of hybrid_grpo that would wait, or of anything
    that is called `everywhere`."""

    def __init__(self, everywhere: bool = False) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._place = "" if everywhere else "hybrid_grpo/"

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        masked = name in _INDEXING and any(i is not None and i.dtype in _MASKS for i in args[1])
        counted = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if masked or counted or name in (*_READS, *_SIZES, *_FROM_HOST):
            self._note(name)
        return operation(*args, **(kwargs or {}))

    def _note(self, name: str) -> None:
        frame = sys._getframe(1)
        places = []
        while frame:
            if frame.f_code.co_filename.endswith(_ALLOWED):
                return
            if self._place in frame.f_code.co_filename:
                places.append(f"{name} at {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}")
            frame = frame.f_back
        self.seen += places[:1]

    def _noted(self, name):
        plain = getattr(torch.Tensor, name)

        def call(*args, **kwargs):
            self._note(name)
            return plain(*args, **kwargs)

        return patch.object(torch.Tensor, name, call)

    def __enter__(self):
        self._readers = ExitStack()
        for name in ("tolist", "numpy", "cpu"):
            self._readers.enter_context(self._noted(name))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._readers.close()
