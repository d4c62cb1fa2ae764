"""Which modules ZeRO-3 fetches whole."""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.model.towers import text_of


def whole_layers(model: Any) -> list[nn.Module]:
    """Return the layers of a causal language model whose weights ZeRO-3 is to gather together, reducing their gradients
    together when the layer's backward pass has ended. By default it does so for each module of a layer, which takes
    Python longer than a GPU takes to compute a small one.

    These are the first layer that trains and those after it. From now on their inputs have gradients in training.
    """
    layers = list(getattr(text_of(model), "layers", ()))
    while layers and not any(p.requires_grad for p in layers[0].parameters()):
        del layers[0]
    for layer in layers:
        layer.register_forward_pre_hook(_with_gradient)
    return layers


def _with_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Let the input of a layer have a gradient, although what is before it does not train or is cut off: DeepSpeed
    reduces the gradients of a whole layer when that of its input is known, which without one is too early."""
    if not torch.is_grad_enabled() or not inputs or not isinstance(inputs[0], Tensor) or inputs[0].requires_grad:
        return None
    return inputs[0].detach().requires_grad_(), *inputs[1:]
