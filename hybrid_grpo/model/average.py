"""The exponential moving average of the weights that are trained, which is often better than the last of them.

It is float32 in host memory, whatever the type of the model, and spread over the ranks as the optimizer's state is: at
ZeRO stage 0 every rank has all of it. With adapters it is that of the adapters.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybrid_grpo.model import shards

_NAME = "average"
"""Name of its files in a checkpoint."""


class MovingAverage:
    """Average of the weights of `module`, which DeepSpeed's `optimizer` trains at a ZeRO `stage`.

    It starts as the weights that the module has. After n updates the weights of k updates ago count (1 - `decay`) *
    `decay`^k in it, and the first ones `decay`^n.
    """

    def __init__(self, module: nn.Module, optimizer: Any, stage: int, decay: float) -> None:
        self._layout = module, optimizer, stage
        self._decay = decay
        self._average = [flat.to("cpu", torch.float32, copy=True) for flat in shards.trained_tensors(*self._layout)]
        self._is_used = False

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are: `decay` times the average plus (1 - `decay`) times the weights."""
        assert not self._is_used, "the weights are the average itself"
        for average, flat in zip(self._average, shards.trained_tensors(*self._layout), strict=True):
            average.lerp_(flat.to("cpu", torch.float32), 1 - self._decay)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the average is the weights of the module; after it they are what they were, to the bit. Needs host
        memory for the largest flat tensor. Collective."""
        assert not self._is_used, "it does not nest"
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        _, optimizer, stage = self._layout
        with shards.changing(optimizer, stage):
            for average, flat in zip(self._average, shards.trained_tensors(*self._layout), strict=True):
                weights = flat.to("cpu", copy=True)
                flat.copy_(average)
                average.copy_(weights)
        self._is_used = not self._is_used

    def save(self, folder: Path) -> None:
        """Write this rank's part into a checkpoint's folder."""
        shards.save_copies(folder, _NAME, self._average, *self._layout)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on any number of ranks and at any ZeRO stage; raises `UserError` where there is
        nothing."""
        shards.load_copies(folder, _NAME, self._average, *self._layout)
