"""Decode steps as CUDA graphs: one launch for a whole forward, where Python would take longer than the GPU.

A graph replays the very addresses that it was captured with, for a fixed number of rows. So rows are rounded up to a
few sizes; what a graph reads and writes must stay where it was.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_SIZE_STEP = 64

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Takes down a step without running it; gives what runs it, and the memory in which its result will be."""


def size_for(rows: int, most: int) -> int:
    """Rows of the graph that `rows` run on, at most `most`."""
    size = next((size for size in _SIZES if size >= rows), -(-rows // _SIZE_STEP) * _SIZE_STEP)
    return min(size, most)


def on_cuda(step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """Capture a step on the current device."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate meanwhile: those of reward models.
    with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
        result = step()
    return graph.replay, result


@functools.cache
def _pool() -> Any:
    """Memory that all graphs share: they run one at a time."""
    return torch.cuda.graph_pool_handle()


class Graphs:
    """The captured steps of one decoder."""

    def __init__(self, capture: Capture = on_cuda) -> None:
        self._capture = capture
        self._captured: dict[tuple[int, int], tuple[Replay, Tensor]] = {}
        self._usable = True

    def run(self, key: tuple[int, int], step: Callable[[], Tensor]) -> Tensor:
        """Run `step`, by its graph if there is one; the first time it runs as it is, and is captured for the next.

        Returns:
            What `step` returns, in memory that the next run of the same key overwrites.
        """
        if key in self._captured:
            replay, result = self._captured[key]
            replay()
            return result
        # Libraries set themselves up on first use, which cannot be captured: the run comes first.
        result = step()
        if self._usable:
            try:
                self._captured[key] = self._capture(step)
            except RuntimeError as error:
                self._usable = False
                warnings.warn(f"decoding runs without CUDA graphs, slower: {str(error).splitlines()[0]}", stacklevel=2)
        return result
