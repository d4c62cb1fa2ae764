"""Weights in eight bits: whole numbers, and a scale for those of each row.

Vector-wise quantization of weights alone (LLM.int8(), arXiv:2208.07339, section 2.1): inputs, and every sum, are as
with the weights themselves. Rollouts may read linear layers so: a decode step of few rows waits for its weights, which
take half the time then. A base in four bits has its embedding and its head so.
"""

from collections.abc import Iterator
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.model.towers import loader

_LARGEST, _ROWS = 127, 512
_UNIT = 64
"""Kernels read this number of inputs at a time, or a part of it."""
_AT_ONCE = 8192
"""Rows that a layer unpacks at a time."""
_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


class Int8Weight(nn.Parameter):
    """A frozen int8 weight [rows, in]. As in weights of bitsandbytes, `quant_state` says how to read it: each row is
    multiplied by its `scale`, float32, and rounded to `dtype`."""

    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> "Int8Weight":
        return super().__new__(cls, codes, requires_grad=False)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.quant_state = SimpleNamespace(shape=codes.shape, dtype=dtype, scale=scale)

    def __getitem__(self, rows: Any) -> Tensor:
        """Return rows in full."""
        codes, form = self.data[rows], self.quant_state
        out = torch.empty(codes.shape, dtype=form.dtype, device=codes.device)
        unpack(codes.view(-1, self.shape[1]), form.scale[rows].view(-1), out.view(-1, self.shape[1]))
        return out


class Int8Linear(nn.Linear):
    """A linear layer whose weight is an `Int8Weight`."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], len(self.weight))
        for rows in (slice(first, first + _AT_ONCE) for first in range(0, len(self.weight), _AT_ONCE)):
            bias = None if self.bias is None else self.bias[rows]
            out[..., rows] = nn.functional.linear(x, self.weight[rows], bias)
        return out


def quantize(weight: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Write a weight [out, in] in eight bits, rounded to the nearest, to int8 `codes` and float32 `scale` [out]."""
    for part, into, of in _blocks(weight, codes, scale):
        of.copy_(part.abs().amax(dim=1)).div_(_LARGEST)
        into.copy_((part / of.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_())


def unpack(codes: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Write the numbers that int8 `codes` [rows, in] stand for, rounded once, to `out`, and return it."""
    for part, of, into in _blocks(codes, scale, out):
        torch.mul(part, of[:, None], out=into)
    return out


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors into rows whose temporaries a CPU has at hand."""
    rows = _ROWS if tensors[0].device.type == "cpu" else len(tensors[0])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def unpacked(weight: Any, out: Tensor | None = None) -> Tensor:
    """Return a weight in full, which may be in eight bits or in four, in `out` if that is given."""
    if isinstance(weight, Int8Weight):
        if out is not None and out.device == weight.device:
            return unpack(weight.data, weight.quant_state.scale, out)
        weight = weight[:]
    elif hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(weight.data, weight.quant_state)
    return weight if out is None else out.copy_(weight)


def tables_of(model: Any) -> list[Any]:
    """Return the different weights of a model's embedding and head, if they may be in eight bits."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    fits = isinstance(embedding, nn.Embedding) and type(head) is nn.Linear and head.in_features % _UNIT == 0
    return list(dict.fromkeys((embedding.weight, head.weight))) if fits else []


@torch.no_grad()
def pack_tables(model: Any) -> None:
    """Round the embedding and the head of a model to eight bits, in place."""
    packed = {}
    for weight in tables_of(model):
        codes, scale = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight), dtype=torch.float32)
        quantize(weight, codes, scale)
        packed[weight] = Int8Weight(codes, scale, weight.dtype)
    if not packed:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    made = Int8Linear(head.in_features, head.out_features, bias=False, device="meta")
    made.weight, made.bias = packed[head.weight], head.bias
    model.set_output_embeddings(made)
    embedding.weight = packed[embedding.weight]
    embedding.forward = partial(_looked_up, embedding)


def _looked_up(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    """Look up ids as the class of an embedding in eight bits does, in no more rows than there are ids."""
    rows, as_in_full = embedding.weight[ids.flatten()], copy(embedding)
    vars(as_in_full).update(_parameters={"weight": rows}, padding_idx=None)
    found: Tensor = type(embedding).forward(as_in_full, torch.arange(len(rows), device=ids.device).view(ids.shape))
    return found


def eight_bit_layers(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the linear layers of a model that may be in eight bits, each with the module it is in and its name there:
    projections of attention and MLPs, not heads, nor what chooses experts, nor those whose weights a model reads."""
    return [
        (parent, name, linear)
        for parent in module.modules()
        for name, linear in parent.named_children()
        if type(linear) is nn.Linear and name in _LAYERS and linear.in_features % _UNIT == 0
    ]


def unpacked_sizes(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> set[int]:
    """Return how many bytes layers of a `kind` take at once for weights that they unpack, and 0."""
    sizes = {0}
    for layer in (m for m in module.modules() if isinstance(m, kind)):
        if (form := getattr(getattr(layer, "weight", None), "quant_state", None)) is not None:
            rows, most = form.shape[0], _AT_ONCE if isinstance(layer, Int8Linear) else form.shape[0]
            sizes |= {form.dtype.itemsize * n * form.shape[1] for n in (min(rows, most), rows % most)}
    return sizes


def check_weights(weights: str, config: Any) -> None:
    """Raise UserError for weights of rollouts that a model does not have, given its configuration."""
    if weights == "int8":
        with torch.device("meta"):
            found = eight_bit_layers(loader(config).from_config(config))
        refuse(not found, "rollout.weights int8 finds no layers q_proj to down_proj in policy.model: leave it out")
