"""Runs the forwards of decode steps as CUDA graphs, with one launch per forward, since Python takes longer to launch
all kernels than the GPU takes to run them.

A graph replays with the addresses and the number of rows of its capture. So the number of rows is rounded up to one of
a few sizes, and tensors that a graph reads or writes must not move.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.config.errors import RunStopped

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_SIZE_STEP = 64
_ROOM = 256 << 20
"""Bytes that must be free before a capture, for its parameters, the logits, and the largest forward's temporaries."""
SURVIVES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether a process survives a failed capture. Before torch 2.13 the allocator acts as if the capture were still under
way, and fails when it next frees memory (pytorch issues 159594, 180395, 190348)."""

GRAPH_BYTES = 16 << 20
"""Bytes of a captured decode step in addition to its tensors, for the parameters of its kernels. Assumed, not measured:
vLLM reports about 0.5 GB for 35 graphs of a model with 8B parameters."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]]
"""Captures a step without running it; returns a function that replays it, and the tensor that will hold its result."""


def size_for(rows: int, most: int) -> int:
    """Return the size (number of rows) of the graph that is used for `rows` rows. No graph is larger than `most`."""
    size = next((size for size in _SIZES if size >= rows), -(-rows // _SIZE_STEP) * _SIZE_STEP)
    return min(size, most)


def sizes_up_to(most: int) -> list[int]:
    """Return all values of `size_for` for up to `most` rows, the largest first."""
    return sorted({size_for(rows, most) for rows in range(1, most + 1)}, reverse=True)


def read_for(pages: int, most: int) -> int:
    """Return the pages that a graph reads of every sequence if it cannot adapt to lengths; the longest has `pages`."""
    return min(1 << (pages - 1).bit_length(), most)


def reads_up_to(most: int, follows: bool) -> list[int]:
    """Return all values of `read_for` for sequences of up to `most` pages, the largest first. If the
    attention `follows` the length of each sequence, graphs differ only in rows, and the only value is `most`."""
    return [most] if follows else sorted({read_for(pages, most) for pages in range(1, most + 1)}, reverse=True)


def bytes_of(slots: int, reads: int, row_bytes: int) -> int:
    """Return the bytes of a decoder's graphs: each one's logits (`row_bytes` per row), the largest's temporaries."""
    sizes = sizes_up_to(slots)
    return (slots + reads * sum(sizes)) * row_bytes + reads * len(sizes) * GRAPH_BYTES


def capture_on(device: torch.device) -> Capture | None:
    """Return a function that captures steps on a device into a new memory pool; None if the device cannot do this."""
    # A pool whose graphs are gone cannot always be opened again (vLLM issue 53682), so each decoder has its own.
    return partial(on_cuda, pool=torch.cuda.graph_pool_handle()) if device.type == "cuda" else None


class NoRoom(Exception):
    """Raised before a capture begins if too little memory is free for it."""


def on_cuda(step: Callable[[], Tensor], pool: Any = None) -> tuple[Replay, Tensor]:
    """Capture a step on the current device; graphs of one `pool` share their memory, since they run one at a time.
    Raises NoRoom if too little memory is free."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < _ROOM:
        raise NoRoom(f"{free >> 20} MiB are free, and capturing takes up to {_ROOM >> 20}")
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
    """The captured steps of one decoder. A step's key is the pair of numbers that it depends on: rows and pages."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._captured: dict[tuple[int, int], tuple[Replay, Tensor]] = {}
        self.usable = True
        """False once a capture has failed; from then on, no steps are captured."""

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: tuple[int, int], step: Callable[[], Tensor]) -> Tensor:
        """Return the result of `step`, in memory that the next run with the same key overwrites.

        The first run of a key calls `step` and then captures its graph. Raises RunStopped if a capture fails and the
        process cannot continue.
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
            except (RuntimeError, NoRoom) as error:
                if not (SURVIVES or isinstance(error, NoRoom)):
                    raise RunStopped(
                        f"a decode step could not be captured as a CUDA graph ({str(error).splitlines()[0]}), after"
                        f" which torch {torch.__version__} cannot go on: lower rollout.max_slots or rollout.cache_gb,"
                        " or install torch 2.13"
                    ) from error
                self.usable = False
                warnings.warn(f"decoding is slower without CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2)
        return result
