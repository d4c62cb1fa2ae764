"""Forwards of decode steps as CUDA graphs: one launch for a whole forward, since launching from Python would take
longer than the GPU computes.

A graph replays with the addresses and the number of rows it was captured with. So rows are rounded up to a few sizes,
and what a graph reads and writes must stay at the same address.
"""

import warnings
from collections.abc import Callable
from functools import partial
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


def sizes_up_to(most: int) -> list[int]:
    """All sizes that `size_for` returns for up to `most` rows, the largest first."""
    return sorted({size_for(rows, most) for rows in range(1, most + 1)}, reverse=True)


def capture_on(device: torch.device) -> Capture | None:
    """What captures steps on a device, all into one new pool of memory; None where steps run as they are."""
    # A pool whose graphs are gone cannot always be opened again (vLLM issue 53682), so each decoder has its own.
    return partial(on_cuda, pool=torch.cuda.graph_pool_handle()) if device.type == "cuda" else None


def on_cuda(step: Callable[[], Tensor], pool: Any = None) -> tuple[Replay, Tensor]:
    """Capture a step on the current device; graphs of one `pool` share their memory, since they run one at a time."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # "thread_local", because threads of reward models may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = step()
    finally:
        # Where a capture cannot begin or end, torch leaves its own stream current, and all later work would run there.
        torch.cuda.set_stream(stream)
    return graph.replay, result


class Graphs:
    """The captured steps of one decoder, by the numbers that a step depends on: its key."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._captured: dict[tuple[int, int], tuple[Replay, Tensor]] = {}
        self.usable = True
        """False once a capture has failed: then steps run as they are."""

    def __len__(self) -> int:
        return len(self._captured)

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
        if self.usable:
            try:
                self._captured[key] = self._capture(step)
            except RuntimeError as error:
                self.usable = False
                warnings.warn(f"decoding runs without CUDA graphs, slower: {str(error).splitlines()[0]}", stacklevel=2)
        return result
