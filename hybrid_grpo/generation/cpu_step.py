"""A decode step as one call of the kernel in decoding.c: float32 on a CPU, for models that `fused_step` recognises."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.model.kernels.build import run
from hybrid_grpo.model.kernels.decoding import fits


class _Layer(ctypes.Structure):
    """`struct layer` of decoding.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("norm", "q", "q_bias", "k", "k_bias", "v", "v_bias", "q_norm")),
        *((name, ctypes.c_void_p) for name in ("k_norm", "o", "o_bias", "mlp_norm", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class _Model(ctypes.Structure):
    """`struct model` of decoding.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "head", "head_bias", "layers")),
        *((name, ctypes.c_int64) for name in ("count", "vocabulary", "hidden", "heads", "kv", "d", "inner", "page")),
        ("epsilon", ctypes.c_float),
    ]


class CpuStep:
    """The decode step of a recognised model, with a cache whose memory must not move."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        base, head = model.base_model, model.get_output_embeddings()
        self._rotary, self._cache = base.rotary_emb, cache
        attended = cache.geometry.attention
        layers = zip(base.layers, cache.keys, cache.values, attended, strict=True)
        self._layers = (_Layer * len(attended))(
            *(
                _Layer(*_addresses(*weights(layer), keys, values), o.window, o.scale, o.softcap)
                for layer, keys, values, o in layers
            )
        )
        attention, mlp = base.layers[0].self_attn, base.layers[0].mlp
        self._vocabulary, hidden = head.weight.shape
        d, inner = attention.head_dim, len(mlp.up_proj.weight)
        heads, kv = len(attention.q_proj.weight) // d, len(attention.k_proj.weight) // d
        self._model = _Model(
            *_addresses(base.embed_tokens.weight, base.norm.weight, head.weight, head.bias),
            ctypes.addressof(self._layers),
            *(len(attended), self._vocabulary, hidden, heads, kv, d, inner, cache.page),
            base.norm.variance_epsilon,
        )
        self._row = 2 * hidden + 2 * heads * d + 2 * kv * d + 2 * inner
        self._memory = torch.empty(0)
        self._rope = torch.empty(0, 2 * d)

    def __call__(self, token_n: Tensor, table_nw: Tensor, position_n: Tensor, read: int) -> Tensor:
        """Return logits_nV after each sequence's token, in memory that the next call overwrites; see `DecodeStep`."""
        entries = read * self._cache.page
        if len(self._rope) < entries:
            position = torch.arange(max(entries, 2 * len(self._rope)))
            self._rope = torch.cat([t[0] for t in self._rotary(self._rope, position[None])], dim=-1)
        n = len(token_n)
        if len(self._memory) < n * (self._row + self._vocabulary):
            self._memory = torch.empty(n * (self._row + self._vocabulary))
        logits_nV = self._memory[: n * self._vocabulary].view(n, self._vocabulary)
        work = self._memory[n * self._vocabulary :]
        tensors = (logits_nV, work, token_n, self._rope[position_n], table_nw, position_n)
        run("decode", ctypes.addressof(self._model), *tensors, n, table_nw.stride(0))
        return logits_nV


def fitting(model: Any, cache: PagedCache) -> bool:
    """Whether the kernel has room for the shapes of a recognised model's attention."""
    attention, (kv, d) = model.base_model.layers[0].self_attn, cache.keys[0].shape[2:]
    return fits(len(attention.q_proj.weight) // d // kv, cache.page, d)


def weights(layer: Any) -> tuple[Tensor | None, ...]:
    """Return the weights of a layer in the order of `struct layer`."""
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    return (
        *(layer.input_layernorm.weight, q.weight, q.bias, k.weight, k.bias, v.weight, v.bias),
        *(getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")),
        *(o.weight, o.bias, layer.post_attention_layernorm.weight),
        *(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight),
    )


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
