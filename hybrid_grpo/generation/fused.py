"""Whole decoder layers on the kernels of native.c, where a layer is known to compute what they do.

Which layers those are is seen, not listed: a layer must have the parts of a Llama layer and nothing else, and a model
with such layers decodes a few tokens both ways first; only if the results agree are they used. Prefills, and
everything that is not a decode step in float32 on a CPU, go through the layer's own forward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from hybrid_grpo.generation import native
from hybrid_grpo.generation.attention import Step
from hybrid_grpo.generation.cache import Geometry, PagedCache

_WEIGHTS = (
    *("norm", "q", "q_bias", "k", "k_bias", "v", "v_bias", "q_norm", "k_norm", "o", "o_bias"),
    *("mlp_norm", "gate", "up", "down"),
)
_SIZES = ("hidden", "heads", "kv", "d", "inner", "window")
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_FAR = 1 << 17
"""Models that scale their attention by position do so from 8,192 or 16,384 on."""


class _Struct(ctypes.Structure):
    """`struct layer` of native.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _WEIGHTS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class _Layer:
    """A decoder layer that looks like the kernel's; `struct` is None while its own forward is to be used."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.own_forward = module.forward
        self.index = module.self_attn.layer_idx
        self.struct: _Struct | None = None
        self.scale, self.window, self.softcap = 1.0, 0, 0.0
        module.forward = MethodType(lambda _, *args, **kwargs: self(*args, **kwargs), module)

    def bind(self) -> None:
        """Point to the weights where they are now."""
        layer, attention, mlp = self.module, self.module.self_attn, self.module.mlp
        q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        weights = (
            *(layer.input_layernorm.weight, q.weight, q.bias, k.weight, k.bias, v.weight, v.bias),
            *(getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")),
            *(o.weight, o.bias, layer.post_attention_layernorm.weight),
            *(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight),
        )
        if not all(w is None or (native.usable(w) and w.is_contiguous()) for w in weights):
            return
        d = attention.head_dim
        self.sizes = (len(q.weight[0]), len(q.weight) // d, len(k.weight) // d, d, len(mlp.up_proj.weight))
        self.struct = _Struct(
            *(None if w is None else w.data_ptr() for w in weights),
            *self.sizes,
            self.window,
            layer.input_layernorm.variance_epsilon,
            self.scale,
            self.softcap,
        )

    def __call__(self, hidden_states: Tensor, *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        if self.struct is None or not isinstance(batch, Step):
            return self.own_forward(hidden_states, *args, batch=batch, **kwargs)
        n = len(hidden_states)
        keys, values, table, position = batch.places(self.index)
        hidden, heads, kv, d, inner = self.sizes
        embeddings = kwargs.get("position_embeddings")
        if not (native.fits(heads // kv, keys.shape[1], d) and isinstance(embeddings, tuple)):
            return self.own_forward(hidden_states, *args, batch=batch, **kwargs)
        cos, sin = (e.expand(n, 1, -1).contiguous() for e in embeddings)
        x = hidden_states.clone(memory_format=torch.contiguous_format)
        work = _scratch(n * (hidden + 2 * heads * d + 2 * kv * d + 2 * inner))
        native.library().decoder_layer(  # type: ignore[union-attr]
            ctypes.addressof(self.struct),
            *(t.data_ptr() for t in (x, work, cos, sin, keys, values, table, position)),
            *(n, keys.shape[1], table.stride(0)),
        )
        return x


_scratches: list[Tensor] = []


def _scratch(size: int) -> Tensor:
    """Memory of `size` numbers, the same for every layer: new memory would be mapped page by page at every call."""
    if not _scratches or len(_scratches[0]) < size:
        _scratches[:] = [torch.empty(size)]
    return _scratches[0]


_fused: WeakKeyDictionary[Any, list[_Layer]] = WeakKeyDictionary()


@contextmanager
def layers(model: Any, geometry: Geometry) -> Iterator[None]:
    """Inside, decode steps of `model` take the kernels wherever they compute the same."""
    if model not in _fused:
        _fused[model] = _agreeing(model, geometry)
    for layer in _fused[model]:
        layer.bind()
    try:
        yield
    finally:
        for layer in _fused[model]:
            layer.struct = None


def _agreeing(model: Any, geometry: Geometry) -> list[_Layer]:
    """The layers to fuse: all that look right if results with them agree, else none."""
    found = [_Layer(module) for module in model.modules() if _looks_right(module)]
    if found and native.library() is not None and geometry.dtype == torch.float32:
        asked: dict[int, tuple[float, int, float]] = {}
        own = _decoded(model, geometry, asked)
        for layer in found:
            layer.scale, layer.window, layer.softcap = asked[layer.index]
            layer.bind()
        if torch.allclose(_decoded(model, geometry, {}), own, rtol=1e-4, atol=1e-4 * float(own.abs().max())):
            return found
    for layer in found:
        del layer.module.forward
        layer.struct = None
    return []


def _looks_right(module: Any) -> bool:
    if {name for name, _ in module.named_children()} != _LAYER:
        return False
    attention, mlp = dict(module.self_attn.named_children()), dict(module.mlp.named_children())
    linears = [attention.get(name) for name in _ATTENTION] + [mlp.get(name) for name in _MLP]
    return (
        attention.keys() - _NORMS == _ATTENTION
        and mlp.keys() - {"act_fn"} == _MLP
        and all(type(linear) is nn.Linear for linear in linears)
        and all(mlp[name].bias is None for name in _MLP)
        and isinstance(module.mlp.act_fn, (nn.SiLU, SiLUActivation))
        and all(hasattr(module.self_attn, name) for name in ("head_dim", "layer_idx"))
        and hasattr(module.input_layernorm, "variance_epsilon")
        and all(p.device.type == "cpu" for p in module.parameters())
    )


class _Noted(Step):
    """A step that notes what each layer's attention asks for."""

    asked: dict[int, tuple[float, int, float]]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float) -> Tensor:
        self.asked[self.layer] = scale, window, softcap
        return super().attend(query, key, value, scale, window, softcap)


def _decoded(model: Any, geometry: Geometry, asked: dict[int, tuple[float, int, float]]) -> Tensor:
    """Hidden states of three sequences at their first places and at one far on, where some models scale by place;
    `asked` gets (scale, window, softcap) by layer."""
    page = 32
    far = min(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _FAR, _FAR) - 1
    cache = PagedCache(geometry, 7, page, torch.device("cpu"))
    table = torch.zeros(3, far // page + 1, dtype=torch.int32)
    table[:, 0] = torch.arange(1, 4)
    table[:, -1] = torch.arange(4, 7)
    states = []
    for place in (0, 1, 2, far):
        position = torch.full((3,), place)
        batch = _Noted(cache, table, position, table.shape[1])
        batch.asked = asked
        token = torch.tensor([[1], [2], [0]]) + place % 7
        out = model.base_model(
            input_ids=token, position_ids=position[:, None], past_key_values=batch, use_cache=True, batch=batch
        )
        states.append(out.last_hidden_state)
    return torch.stack(states)
