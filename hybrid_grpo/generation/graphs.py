"""Decode steps as CUDA graphs: one launch for a whole forward, since launching from Python would take longer than the
GPU computes.

A graph replays with the addresses and the number of rows it was captured with. So rows are rounded up to a few sizes,
and what a graph reads and writes must stay at the same address.
"""

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
"""Captures a step without running it; returns the replay, and the tensor that will hold its result."""


def size_for(rows: int, most: int) -> int:
    """Number of rows of the graph on which `rows` rows run, at most `most`."""
    size = next((size for size in _SIZES if size >= rows), -(-rows // _SIZE_STEP) * _SIZE_STEP)
    return min(size, most)


def on_cuda(step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """Capture a step on the current device."""
    graph = torch.cuda.CUDAGraph()
    # "thread_local", because threads of reward models may allocate memory meanwhile.
    with torch.cuda.graph(graph, pool=_pool(), capture_error_mode="thread_local"):
        result = step()
    return graph.replay, result


@functools.cache
def _pool() -> Any:
    """Memory that all graphs share, since they run one at a time."""
    return torch.cuda.graph_pool_handle()


class Graphs:
    """The captured steps of one decoder."""

    def __init__(self, capture: Capture = on_cuda) -> None:
        self._capture = capture
        self._captured: dict[tuple[int, int], tuple[Replay, Tensor]] = {}
        self._usable = True

    def run(self, key: tuple[int, int], step: Callable[[], Tensor]) -> Tensor:
        """The result of `step`, in memory that the next run of the same key overwrites.

        The first time for a key `step` runs as it is and is then captured; later its graph is replayed.
        """
        if key in self._captured:
            replay, result = self._captured[key]
            replay()
            return result
        # Run before capturing: libraries set themselves up on first use, which cannot be captured.
        result = step()
        if self._usable:
            try:
                self._captured[key] = self._capture(step)
            except RuntimeError as error:
                self._usable = False
                warnings.warn(f"decoding runs without CUDA graphs, slower: {str(error).splitlines()[0]}", stacklevel=2)
        return result
