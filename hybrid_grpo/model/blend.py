"""Moves the weights of a frozen model towards those of a trained one, in steps of any size.

Small steps are lost in bfloat16: 1 % of a difference of 5 % is below half a unit in a weight's last place, so a weight
that was rounded after every step would never move. The average is therefore kept in float32, and the weights, with
which the model runs, are its rounding.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybrid_grpo.distributed.tensor_files import settle


@torch.no_grad()
def blend(
    weights: Mapping[str, Tensor], targets: Mapping[str, Tensor], mix: float, averages: dict[str, Tensor]
) -> None:
    """Set `weights` to `mix` times `targets`, of the same names, plus (1 - `mix`) times their present values.

    `averages` holds the unrounded values, float32 in host memory, of weights that are not float32. Those that it lacks
    start from the weights; with `mix` 1, which is a copy, it is emptied.
    """
    settle()
    if mix == 1:
        averages.clear()
    for name, weight in weights.items():
        if mix < 1 and weight.dtype != torch.float32 and name not in averages:
            averages[name] = weight.to("cpu", torch.float32)
        average = averages.get(name, weight)
        average.copy_(torch.lerp(average.float(), targets[name].to(average.device, torch.float32), mix))
        weight.copy_(average)
