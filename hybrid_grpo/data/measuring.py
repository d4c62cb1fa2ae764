"""Runs a model over completions to measure their tokens, without gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.data.batch import MicroBatch


@torch.no_grad()
def measured(
    engine: Callable[..., Any],
    batches: list[MicroBatch],
    shape: tuple[int, int],
    temperature: float,
    more: Callable[..., tuple[Tensor, ...]] | None = None,
) -> list[Tensor]:
    """Return the log-probability and the entropy of every completion token in `batches`, and what `more` returns for
    it, each float32 [B, T] (`shape`), 0 elsewhere. Collective. `engine` runs a `LogprobModel`, `more` is a
    `HeadFunction`, and every rank has the same number of batches."""
    found_BT: list[Tensor] = []
    for micro in batches:
        values = engine(*micro.inputs, temperature, more)
        found_BT = found_BT or [torch.zeros(shape, device=micro.input_ids_bS.device) for _ in values]
        for value_BT, value_N in zip(found_BT, values if micro.rows else (), strict=False):
            micro.put(value_BT, value_N)
    return found_BT
