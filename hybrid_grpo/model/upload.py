"""Copies numbers from the host to the device, and selects rows there by such numbers."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def upload(numbers: Any, device: torch.device) -> Tensor:
    """Copy an array, a tensor in host memory or nested lists to the device.

    A GPU copies them from pinned memory when it reaches the copy; with pageable memory the host waits until then.
    """
    host = torch.as_tensor(numbers)
    return host.pin_memory().to(device, non_blocking=True) if on_gpu(device) else host


class _Gather(torch.autograd.Function):
    """Selects rows of x by index; a row may be repeated. Backward sums in a fixed order, unlike index_add on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, uses: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.rows, ctx.uses = len(x), uses
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dx = grad.new_zeros(ctx.rows, *grad.shape[1:])
        for row_R, output_RM in ctx.uses:
            used = grad.index_select(0, output_RM.flatten())
            dx.index_copy_(0, row_R, used.unflatten(0, output_RM.shape).sum(1) if output_RM.shape[1] > 1 else used)
        return dx, None, None


class Selection:
    """A gather of rows whose backward is deterministic; `index` holds the input row of each output row."""

    def __init__(self, index: np.ndarray, device: torch.device) -> None:
        order = np.argsort(index, kind="stable")
        rows, first, counts = np.unique(index[order], return_index=True, return_counts=True)
        self._index = upload(index, device)
        # Input rows grouped by how often they are used, each with its output rows.
        self._uses = []
        for count in np.unique(counts):
            chosen = counts == count
            outputs = order[first[chosen, None] + np.arange(count)]
            self._uses.append((upload(rows[chosen], device), upload(outputs, device)))

    def __call__(self, x: Tensor) -> Tensor:
        chosen: Tensor = _Gather.apply(x, self._index, self._uses)
        return chosen
