"""The memory of a tower that sees pictures, estimated from its configuration."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from hybrid_grpo.config import LoraConfig, PolicyConfig
from hybrid_grpo.data.pictures import ImageStore
from hybrid_grpo.model.lora import Adapters
from hybrid_grpo.model.towers import tower_class
from hybrid_grpo.run.memory.phases import Part

_BESIDE_PRODUCTS = 1.25
"""Bytes that are kept for a backward pass, relative to what goes into linear layers and comes out: 0.9 to 1.4 were
measured in ten families, 2.2 in Gemma 4. Layers after a merger, which have fewer rows, are counted as if they had all.
"""


@dataclass(frozen=True)
class TowerSizes:
    """Sizes of a tower."""

    parameters: int = 0
    trained: int = 0
    """Number of parameters that have gradients and optimizer states; 0 if the tower is frozen."""
    activations: int = 0
    """Bytes that a trained tower keeps of the largest picture for the backward pass."""

    def at_rest(self, dtype: int, shards: int, has_reference: bool) -> Part:
        """Return the weights on a rank, in `dtype` bytes each. A trained tower is there a second time in the engine, in
        `shards`, and as it was for a reference."""
        copies = 2 if self.trained and has_reference else 1
        return Part("tower", dtype * (copies * self.parameters + self.trained // shards), "policy.vision frozen")

    @property
    def learning(self) -> Part:
        """What the tower's backward pass adds."""
        return Part("tower's gradients", 4 * self.trained + self.activations, "a lower data.max_pixels")

    def cache(self, policy: PolicyConfig) -> Part:
        """Return what is kept of pictures in host memory."""
        kept = int(policy.picture_cache_gb * 2**30) if self.parameters else 0
        return Part("pictures", kept, "a lower policy.picture_cache_gb")


NO_TOWER = TowerSizes()


def tower_sizes(policy: PolicyConfig, lora: LoraConfig, config: Any, album: ImageStore | None) -> TowerSizes:
    """Return the sizes of a model's tower for the pictures of an album; `NO_TOWER` if there are none."""
    if album is None or album.empty:
        return NO_TOWER
    with torch.device("meta"):
        tower = tower_class(config)(deepcopy(config))
        total = sum(parameter.numel() for parameter in tower.parameters())
        if policy.vision == "frozen":
            return TowerSizes(total)
        widths = sum(m.in_features + m.out_features for m in tower.modules() if isinstance(m, nn.Linear))
        embeddings = (m for m in tower.modules() if isinstance(m, nn.Conv2d | nn.Conv3d))
        trained = sum(p.numel() for p in Adapters(tower, lora, seed=0).parameters) if lora.rank else total
    pixels = album.largest["pixel_values"]
    patches = pixels.numel() / next((prod(m.weight.shape[1:]) for m in embeddings), pixels.shape[-1])
    kept = _BESIDE_PRODUCTS * getattr(torch, policy.dtype).itemsize * patches * widths
    return TowerSizes(total, trained, int(kept))
