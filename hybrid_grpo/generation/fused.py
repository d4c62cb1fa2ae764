"""A whole decode step as one call of the kernel in decoding.c, for models that compute what Llama does.

Models are tested rather than listed: a model must have exactly the parts of a Llama model, and then decodes a few
tokens both ways; the kernel is used only if the results agree. Prefills, and all but float32 on a CPU, go through the
model's own forward.
"""

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from hybrid_grpo.generation.attention import decode_step
from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.model.kernels.build import run, usable
from hybrid_grpo.model.kernels.decoding import fits

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {
    *("self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
    *("input_layernorm", "post_attention_layernorm"),
}
_HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that depend on the position only; other kinds look at the whole batch."""
_FAR = 1 << 17
"""A position beyond 8,192 and 16,384, from which some models scale their attention by position."""


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


class Fused:
    """The decode step of a model for which `_looks_right` holds, over a cache whose memory stays where it is."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        base, head = model.base_model, model.get_output_embeddings()
        self._rotary, self._cache = base.rotary_emb, cache
        asked = cache.geometry.asked
        layers = zip(base.layers, cache.keys, cache.values, asked, strict=True)
        self._layers = (_Layer * len(asked))(
            *(
                _Layer(*_addresses(*_weights(layer), keys, values), window, scale, softcap)
                for layer, keys, values, (scale, window, softcap) in layers
            )
        )
        attention, mlp = base.layers[0].self_attn, base.layers[0].mlp
        self._vocabulary, hidden = head.weight.shape
        d, inner = attention.head_dim, len(mlp.up_proj.weight)
        heads, kv = len(attention.q_proj.weight) // d, len(attention.k_proj.weight) // d
        self._model = _Model(
            *_addresses(base.embed_tokens.weight, base.norm.weight, head.weight, head.bias),
            ctypes.addressof(self._layers),
            *(len(asked), self._vocabulary, hidden, heads, kv, d, inner, cache.page),
            base.norm.variance_epsilon,
        )
        self._row = 2 * hidden + 2 * heads * d + 2 * kv * d + 2 * inner
        self._memory = torch.empty(0)
        self._rope = torch.empty(0, 2 * d)

    def __call__(self, token_n: Tensor, table_nw: Tensor, position_n: Tensor, read: int) -> Tensor:
        """logits_nV after each sequence was fed its token, in memory that the next call overwrites.

        Args:
            token_n, position_n: int64 [n].
            table_nw: int32 [n, width], pages of each sequence.
            read: pages of the longest sequence.
        """
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


_agreed: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def fused(model: Any, cache: PagedCache) -> Fused | None:
    """The kernel's decode step of a model whose weights are whole; None: use the model's own forward."""
    if not usable(*model.parameters()) or not _looks_right(model, cache):
        return None
    if model not in _agreed:
        _agreed[model] = _agrees(model, cache)
    return Fused(model, cache) if _agreed[model] else None


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _weights(layer: Any) -> tuple[Tensor | None, ...]:
    """Weights of a layer in the order of `struct layer`."""
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    return (
        *(layer.input_layernorm.weight, q.weight, q.bias, k.weight, k.bias, v.weight, v.bias),
        *(getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")),
        *(o.weight, o.bias, layer.post_attention_layernorm.weight),
        *(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight),
    )


def _looks_right(model: Any, cache: PagedCache) -> bool:
    base, head = model.base_model, model.get_output_embeddings()
    if {name for name, _ in base.named_children()} != _MODEL or type(head) is not nn.Linear:
        return False
    kv, d = cache.keys[0].shape[2:]
    layers = list(base.layers)
    return (
        type(base.embed_tokens) is nn.Embedding
        and getattr(base.rotary_emb, "rope_type", None) in _ROPE
        and all(_layer_looks_right(layer, base.norm) for layer in layers)
        and len({tuple(None if w is None else w.shape for w in _weights(layer)) for layer in layers}) == 1
        and all(pool.shape[2:] == (kv, d) for pool in cache.keys + cache.values)
        and layers[0].self_attn.head_dim == d
        and fits(len(layers[0].self_attn.q_proj.weight) // d // kv, cache.page, d)
        and all(parameter.is_contiguous() for parameter in model.parameters())
    )


def _layer_looks_right(layer: Any, norm: Any) -> bool:
    parts = {name: part for name, part in layer.named_modules() if name}
    linears = [part for name, part in parts.items() if name.endswith("_proj")]
    norms = [part for name, part in parts.items() if name.endswith("norm")]
    return (
        parts.keys() - _HEAD_NORMS == _LAYER
        and all(type(linear) is nn.Linear for linear in linears)
        and layer.mlp.gate_proj.bias is layer.mlp.up_proj.bias is layer.mlp.down_proj.bias is None
        and isinstance(layer.mlp.act_fn, (nn.SiLU, SiLUActivation))
        and hasattr(layer.self_attn, "head_dim")
        and hasattr(norm, "variance_epsilon")
        and all(getattr(part, "variance_epsilon", None) == norm.variance_epsilon for part in norms)
    )


def _agrees(model: Any, like: PagedCache) -> bool:
    """Whether the kernel decodes what the model does.

    Compared on three sequences, at their first three positions and at a far one, where some models scale by position.
    """
    far = min(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _FAR, _FAR) - 1
    own, other = (PagedCache(like.geometry, 7, like.page, torch.device("cpu")) for _ in range(2))
    table = torch.zeros(3, far // like.page + 1, dtype=torch.int32)
    table[:, 0] = torch.arange(1, 4)
    table[:, -1] = torch.arange(4, 7)
    step = Fused(model, other)
    for at in (0, 1, 2, far):
        position, token = torch.full((3,), at), torch.tensor([1, 2, 0]) + at % 7
        expected = decode_step(model, own, token, table, position, table.shape[1])
        logits = step(token, table, position, table.shape[1])
        if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
            return False
    return True
