"""A decode step with Triton kernels between the matrix products, for models that `fused_step` recognizes.

To decode one token of each sequence, a layer of transformers launches about 40 kernels, most of which read vectors for
only a microsecond. Here a layer launches nine: the norm kernel also adds the residual, the rotation kernel also writes
to the cache, and weights that multiply the same vectors, if they are neighbors in memory, do so as one (see `View`).
All memory is kept, so that a capture as a CUDA graph takes none.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.generation.cache import PagedCache, Rows
from hybrid_grpo.generation.paged_attention import DecodeStep
from hybrid_grpo.model.gathered_weights import joined
from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.towers import text_of


class GpuStep:
    """The decode step of a recognized model."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        self._model, self._base, self._cache = model, text_of(model), cache
        self._ropes: dict[int, Tensor] = {}
        """Cosines and sines, [positions, 2 * d], by number of positions. CUDA graphs read them in place."""
        self._rows = 0

    def _take_memory(self, rows: int, like: Tensor) -> None:
        layer = self._base.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        self._rows, hidden = max(rows, self._cache.slots), len(attention.o_proj.weight)
        qkv = sum(len(part.weight) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        inner, attended = mlp.down_proj.in_features, attention.o_proj.in_features
        widths = hidden, hidden, hidden, qkv, attended, 2 * inner, inner
        self._memory = [like.new_empty(self._rows, width) for width in widths]
        self._memory.append(torch.empty(self._rows, dtype=torch.float32, device=like.device))

    def __call__(self, rows: Rows, out: Tensor | None = None) -> Tensor:
        """Return logits_nV after each row's token, in `out` if given; see `decode_step`."""
        base, head, cache = self._base, self._model.get_output_embeddings(), self._cache
        step, rotary_n, position_n, table_nw = DecodeStep(cache, rows), rows.encoded_n, rows.position_n, rows.table_nw
        weight, n = base.embed_tokens.weight, len(rows.token_n)
        if n > self._rows:
            self._take_memory(n, weight)
        x_nD, h_nD, delta_nD, qkv, attended, gate_up, inner, inverse_n = (part[:n] for part in self._memory)
        added: Tensor | None = None
        torch.index_select(weight, 0, rows.token_n, out=x_nD)
        rope = self._rope(table_nw.shape[1] * cache.page, weight)
        epsilon = base.norm.variance_epsilon
        for index, layer in enumerate(base.layers):
            attention, mlp = layer.self_attn, layer.mlp
            gpu.norm.add_norm(x_nD, added, layer.input_layernorm.weight, epsilon, (x_nD, h_nD, inverse_n))
            _products(h_nD, (attention.q_proj, attention.k_proj, attention.v_proj), qkv)
            norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
            keys, values = cache.keys[index], cache.values[index]
            gpu.rotation.rotate_and_store(qkv, norms, epsilon, rope, rotary_n, position_n, table_nw, keys, values)
            query = qkv[:, : attended.shape[1]].view(n, -1, 1, attention.head_dim)
            options = cache.geometry.attention[index]
            found = step.attend_to(query, keys, values, options, attended.view(n, -1, attention.head_dim))
            _products(found.view(n, -1), (attention.o_proj,), delta_nD)
            gpu.norm.add_norm(x_nD, delta_nD, layer.post_attention_layernorm.weight, epsilon, (x_nD, h_nD, inverse_n))
            _products(h_nD, (mlp.gate_proj, mlp.up_proj), gate_up)
            gpu.gate.silu_times(gate_up[:, : inner.shape[1]], gate_up[:, inner.shape[1] :], inner)
            _products(inner, (mlp.down_proj,), delta_nD)
            added = delta_nD
        gpu.norm.add_norm(x_nD, added, base.norm.weight, epsilon, (x_nD, h_nD, inverse_n))
        logits_nV = weight.new_empty(n, len(head.weight)) if out is None else out
        _products(h_nD, (head,), logits_nV)
        return logits_nV

    def _rope(self, positions: int, like: Tensor) -> Tensor:
        if positions not in self._ropes:
            position_1P = torch.arange(positions, device=like.device)[None]
            cos, sin = self._base.rotary_emb(like[None], position_1P)
            self._ropes[positions] = torch.cat([cos[0], sin[0]], dim=-1)
        return self._ropes[positions]


def _products(x: Tensor, modules: Sequence[nn.Linear], out: Tensor) -> None:
    """Write the outputs of linear modules on the same input to `out`, one beside the other."""
    weight = joined([module.weight for module in modules])
    biases = [module.bias for module in modules if module.bias is not None]
    bias = joined(biases) if len(biases) == len(modules) else None
    if weight is not None and (bias is not None or not biases):
        _product(x, weight, bias, out)
        return
    for module, part in zip(modules, out.split([len(module.weight) for module in modules], dim=1), strict=True):
        _product(x, module.weight, module.bias, part)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
