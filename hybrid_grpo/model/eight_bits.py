"""Linear layers in eight bits, which rollouts may read: whole numbers, and a scale for the weights of each output.

Vector-wise quantization of weights alone (LLM.int8(), arXiv:2208.07339, section 2.1): inputs, and every sum, are as
with the weights themselves. A decode step of few rows waits for its weights, which take half the time then.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.model.towers import loader

_LARGEST, _ROWS = 127, 512
_UNIT = 64
"""Kernels read this number of inputs at a time, or a part of it."""
_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


class Int8Linear(nn.Linear):
    """A linear layer with an int8 `weight` [out, in] and the `scale` [out], float32, of each of its rows."""

    scale: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight * self.scale[:, None]).to(x.dtype), self.bias)


def quantize(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Write a weight [out, in] in eight bits, rounded to the nearest, to int8 `codes` and float32 `scale` [out]."""
    # A CPU has memory at hand for small parts.
    rows = _ROWS if weight.device.type == "cpu" else len(weight)
    for part, into, of in zip(*(tensor.split(rows) for tensor in (weight, codes, scale)), strict=True):
        of.copy_(part.abs().amax(dim=1)).div_(_LARGEST)
        into.copy_((part / of.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_())


def eight_bit_layers(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the linear layers of a model that may be in eight bits, each with the module it is in and its name there:
    projections of attention and MLPs, not heads, nor what chooses experts, nor those whose weights a model reads."""
    return [
        (parent, name, linear)
        for parent in module.modules()
        for name, linear in parent.named_children()
        if type(linear) is nn.Linear and name in _LAYERS and linear.in_features % _UNIT == 0
    ]


def unpacked_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the most bytes that a forward takes for a weight which it multiplies in full: of eight bits by way of
    float32, or of four bits."""
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    forms = [getattr(m.weight, "quant_state", None) for m in linears]
    of_four = [form.shape.numel() * dtype.itemsize for form in forms if form is not None]
    return max([*of_four, *(m.weight.numel() * (4 + dtype.itemsize % 4) for m in linears if type(m) is Int8Linear), 0])


def check_weights(weights: str, config: Any) -> None:
    """Raise UserError for weights of rollouts that a model does not have, given its configuration."""
    if weights == "int8":
        with torch.device("meta"):
            found = eight_bit_layers(loader(config).from_config(config))
        refuse(not found, "rollout.weights int8 finds no layers q_proj to down_proj in policy.model: leave it out")
