"""A decode step with Triton kernels between the matrix products, for models that `fused_step` recognises.

To decode one token of each sequence, a layer of transformers launches about 40 kernels, most of which read vectors for
only a microsecond. Here a layer launches twelve: the norm kernel also adds the residual, and the rotation kernel also
writes to the cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.paged_attention import DecodeStep
from hybrid_grpo.model.kernels import gpu


class GpuStep:
    """The decode step of a recognised model."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._ropes: dict[int, Tensor] = {}
        """Cosines and sines, [positions, 2 * d], by number of positions. CUDA graphs read them in place."""

    def __call__(self, token_n: Tensor, table_nw: Tensor, position_n: Tensor, read: int) -> Tensor:
        """Return logits_nV after each sequence's token; see `DecodeStep`."""
        base, head, cache = self._model.base_model, self._model.get_output_embeddings(), self._cache
        step = DecodeStep(cache, table_nw, position_n, read)
        x_nD, delta_nD = embedding(token_n, base.embed_tokens.weight), None
        rope = self._rope(table_nw.shape[1] * cache.page, x_nD)
        epsilon = base.norm.variance_epsilon
        for index, layer in enumerate(base.layers):
            attention, mlp = layer.self_attn, layer.mlp
            x_nD, h_nD = gpu.norm.add_norm(x_nD, delta_nD, layer.input_layernorm.weight, epsilon)
            q, k, v = (_linear(h_nD, part) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
            norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
            pools = cache.keys[index], cache.values[index]
            gpu.rotation.rotate_and_store(q, k, v, norms, epsilon, rope, position_n, table_nw, *pools)
            query = q.view(len(q), -1, 1, attention.head_dim)
            attended = step.attend_to(*pools, query, cache.geometry.attention[index])
            delta_nD = _linear(attended.view(len(q), -1), attention.o_proj)
            x_nD, h_nD = gpu.norm.add_norm(x_nD, delta_nD, layer.post_attention_layernorm.weight, epsilon)
            inner = gpu.gate.silu_times(_linear(h_nD, mlp.gate_proj), _linear(h_nD, mlp.up_proj))
            delta_nD = _linear(inner, mlp.down_proj)
        _, h_nD = gpu.norm.add_norm(x_nD, delta_nD, base.norm.weight, epsilon)
        return _linear(h_nD, head)

    def _rope(self, positions: int, like: Tensor) -> Tensor:
        if positions not in self._ropes:
            position_1P = torch.arange(positions, device=like.device)[None]
            cos, sin = self._model.base_model.rotary_emb(like[None], position_1P)
            self._ropes[positions] = torch.cat([cos[0], sin[0]], dim=-1)
        return self._ropes[positions]


def _linear(x: Tensor, module: Any) -> Tensor:
    return linear(x, module.weight, module.bias)
