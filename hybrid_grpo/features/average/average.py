"""The exponential moving average of the trained weights, which is often better than the final weights.

The average is float32 in host memory, whatever the type of the model, and sharded over the ranks like the optimizer
state; at ZeRO stage 0 every rank has all of it. With LoRA, the adapters are averaged.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hybrid_grpo.config import BatchPlan, ModelRunConfig
from hybrid_grpo.distributed import shards
from hybrid_grpo.features.average.settings import AverageConfig
from hybrid_grpo.policy import Policy
from hybrid_grpo.run.feature import Feature
from hybrid_grpo.run.inputs import RunInputs
from hybrid_grpo.run.memory.phases import Part
from hybrid_grpo.run.memory.plan import FeatureMemory, Plan
from hybrid_grpo.run.parts import SideModel

_NAME = "average"
"""Name of the average's files in a checkpoint."""


class MovingAverage(SideModel):
    """Average of the weights of `module`, which DeepSpeed's `optimizer` trains at ZeRO `stage`. After n updates the
    initial weights have the coefficient `decay`^n, and the weights of k updates ago (1 - `decay`) * `decay`^k. It
    is exported as `model_ema/`."""

    def __init__(self, module: nn.Module, optimizer: Any, stage: int, decay: float) -> None:
        self._layout, self._decay = (module, optimizer, stage), decay
        self._average = [flat.to("cpu", torch.float32, copy=True) for flat in shards.trained_tensors(*self._layout)]
        self._is_used = False

    @torch.no_grad()
    def update(self) -> None:
        """Set the average to `decay` times itself plus (1 - `decay`) times the current weights."""
        assert not self._is_used, "the weights are the average itself"
        for average, flat in zip(self._average, shards.trained_tensors(*self._layout), strict=True):
            average.lerp_(flat.to("cpu", torch.float32), 1 - self._decay)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the context, the average replaces the weights of the module; afterwards the weights are restored bit
        for bit. Needs host memory for a copy of the largest flat tensor. Collective."""
        assert not self._is_used, "it does not nest"
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @property
    def exports(self) -> Mapping[str, Callable[[], AbstractContextManager[None]]]:
        return {"model_ema": self.used}

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
        """See `SideModel`."""
        shards.save_copies(folder, _NAME, self._average, *self._layout)

    def load(self, folder: Path) -> None:
        """See `SideModel`. The ZeRO stage may be another one, too."""
        shards.load_copies(folder, _NAME, self._average, *self._layout)

    def checkpoint_bytes(self, weights: int) -> int:
        """See `SideModel`."""
        return 4 * weights


class AverageMemory(FeatureMemory):
    """A float32 copy, in host memory, of the weights that this rank's optimizer updates."""

    name = "average"

    def part(self, plan: Plan, on_host: bool) -> Part:
        """See `FeatureMemory`."""
        return Part("moving average", 4 * plan.owned if on_host else 0, "average.decay null, more ranks")

    def saved(self, plan: Plan) -> int:
        """See `FeatureMemory`."""
        return 4 * plan.owned


class Average(Feature):
    """Keeps the moving average in a run of any kind."""

    name, memory = "average", AverageMemory
    model: MovingAverage

    def __init__(self, config: ModelRunConfig, plan: BatchPlan | None, inputs: RunInputs | None) -> None:
        self._decay = config.of(AverageConfig).decay

    def load(self, policy: Policy) -> None:
        """Start the average as a copy of the policy's weights."""
        assert self._decay is not None
        engine = policy.engine
        trained, optimizer = engine.engine.module, engine.engine.optimizer
        self.model = MovingAverage(trained, optimizer, engine.stage, self._decay)

    def stepped(self) -> None:
        self.model.update()
