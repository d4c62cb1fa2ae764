"""Runs the forwards of decode steps as CUDA graphs, with one launch per forward, since Python takes longer to launch
all kernels than the GPU takes to run them.

A graph replays with the addresses and the number of rows of its capture. So the number of rows is rounded up to one of
a few sizes, and tensors that a graph reads or writes must not move. A graph serves sequences of all lengths.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.model.kernels.gpu import fall_back

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_SIZE_STEP = 64
_ROOM = 256 << 20
"""Bytes that must be free before a capture, for its parameters, the logits, and the largest forward's temporaries."""
GRAPH_BYTES = 16 << 20
"""Bytes of a captured decode step in addition to its tensors, for the parameters of its kernels. Assumed, not measured:
vLLM reports about 0.5 GB for 35 graphs of a model with 8B parameters."""

_SHARED_BYTES = 72 << 20
"""Scratch memory of attention, for heads of 256 numbers or latents of 512; see `kernels.gpu.attention.Scratch`."""

Replay = Callable[[], None]
Step = Callable[[], Sequence[Tensor]]
Capture = Callable[[Step], tuple[Replay, Sequence[Tensor]]]
"""Captures a step without running it; returns a function that replays it, and the tensors that will hold its result."""


def size_for(rows: int, most: int) -> int:
    """Return the size (number of rows) of the graph that is used for `rows` rows. No graph is larger than `most`."""
    size = next((size for size in _SIZES if size >= rows), -(-rows // _SIZE_STEP) * _SIZE_STEP)
    return min(size, most)


def sizes_up_to(most: int) -> list[int]:
    """Return all values of `size_for` for up to `most` rows, the largest first."""
    return sorted({size_for(rows, most) for rows in range(1, most + 1)}, reverse=True)


def bytes_of(slots: int) -> int:
    """Return the bytes of a decoder's graphs and of the memory that their kernels share, without the logits."""
    return len(sizes_up_to(slots)) * GRAPH_BYTES + _SHARED_BYTES


def on_cuda(step: Step, pool: Any = None) -> tuple[Replay, Sequence[Tensor]]:
    """Capture a step on the current device; graphs of one `pool` share their memory, since they run one at a time.
    Raises RuntimeError, before it begins, if too little memory is free."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < _ROOM:
        raise RuntimeError(f"{free >> 20} MiB are free, and capturing takes up to {_ROOM >> 20}")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # "thread_local", because threads of reward models may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = step()
    finally:
        # After a capture that cannot begin or end, torch leaves its own stream current.
        torch.cuda.set_stream(stream)
    return graph.replay, result


class Graphs:
    """The captured steps of one kind, by their numbers of rows."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._captured: dict[int, tuple[Replay, Sequence[Tensor]]] = {}
        self.usable = True
        """False once a capture has failed; from then on, no steps are captured."""

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, rows: int, step: Step) -> Sequence[Tensor]:
        """Return the result of `step`, in memory that the next run with as many rows overwrites.

        The first run calls `step` and then captures its graph. If that fails, steps run as they are from then on, with
        a warning. The process survives it (docs/measured.md).
        """
        if rows in self._captured:
            replay, result = self._captured[rows]
            replay()
            return result
        # Run before capturing: libraries set themselves up on first use, which cannot be captured.
        result = step()
        if self.usable:
            try:
                self._captured[rows] = self._capture(step)
            except RuntimeError as error:
                self.usable = False
                fall_back("decoding", "CUDA graphs", str(error).splitlines()[0])
        return result
