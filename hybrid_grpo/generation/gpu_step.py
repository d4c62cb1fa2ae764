"""A decode step with Triton kernels around the matrix products, for models that `fused_step` recognizes.

To decode one token of each sequence, a layer of transformers launches about 40 kernels, most of which read vectors for
only a microsecond. Here a layer launches five: the products compute the norm before them, and the gate or the sum after
them; attention rotates, and writes to the cache. Of more rows than `Tiling.most_rows` torch computes the products,
and a layer launches eight. Weights that multiply the same vectors, if they are neighbors in memory, do so as one (see
`View`). Layers with weights in four or eight bits, or with an adapter of their own, are read as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.generation.cache import PagedCache, Rows
from hybrid_grpo.generation.paged_attention import DecodeStep
from hybrid_grpo.model.eight_bits import Int8Linear, Int8Weight, unpack
from hybrid_grpo.model.gathered_weights import joined
from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.lora import Adapter, reads_packed
from hybrid_grpo.model.towers import text_of


class GpuStep:
    """The decode step of a recognized model; a kernel multiplies up to `most_rows` rows. All memory is kept, so that a
    capture as a CUDA graph takes none."""

    def __init__(self, model: Any, cache: PagedCache, most_rows: int) -> None:
        self._model, self._base, self._cache, self.most_rows = model, text_of(model), cache, most_rows
        self._ropes: dict[int, Tensor] = {}
        """Cosines and sines, [positions, 2 * d], by number of positions. CUDA graphs read them in place."""
        self._rows = 0

    def _take_memory(self, rows: int, like: Tensor) -> None:
        layer = self._base.layers[0]
        attention, mlp = layer.self_attn, layer.mlp
        self._rows, hidden = max(rows, self._cache.slots), attention.o_proj.out_features
        qkv = sum(part.out_features for part in (attention.q_proj, attention.k_proj, attention.v_proj))
        inner, attended = mlp.down_proj.in_features, attention.o_proj.in_features
        self._memory = [
            like.new_empty(self._rows, width) for width in (hidden, hidden, qkv, attended, 2 * inner, inner)
        ]
        self._memory.append(torch.empty(self._rows, dtype=torch.float32, device=like.device))

    def __call__(self, rows: Rows, out: Tensor | None = None) -> Tensor:
        """Return logits_nV after each row's token, in `out` if given; see `decode_step`."""
        base, head, cache = self._base, self._model.get_output_embeddings(), self._cache
        step, weight, like, n = DecodeStep(cache, rows), base.embed_tokens.weight, base.norm.weight, len(rows.token_n)
        if n > self._rows:
            self._take_memory(n, like)
        x_nD, _, qkv, attended, gate_up, inner, _ = (part[:n] for part in self._memory)
        if isinstance(weight, Int8Weight):
            unpack(weight.data[rows.token_n], weight.quant_state.scale[rows.token_n], x_nD)
        else:
            torch.index_select(weight, 0, rows.token_n, out=x_nD)
        rope = self._rope(rows.table_nw.shape[1] * cache.page, like)
        epsilon = base.norm.variance_epsilon
        for index, layer in enumerate(base.layers):
            attention, mlp = layer.self_attn, layer.mlp
            self._products(x_nD, (attention.q_proj, attention.k_proj, attention.v_proj), qkv, layer.input_layernorm)
            norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
            turn, d = gpu.attention.Turn(qkv, rope, rows.encoded_n, norms, epsilon), attention.head_dim
            query, out_nHd = qkv[:, : attended.shape[1]].view(n, -1, 1, d), attended.view(n, -1, d)
            of_layer = cache.keys[index], cache.values[index], cache.geometry.attention[index]
            step.by_kernel(query, *of_layer, out=out_nHd, turn=turn)
            self._products(attended, (attention.o_proj,), x_nD, add=True)
            self._gated(x_nD, layer.post_attention_layernorm, mlp, gate_up, inner)
            self._products(inner, (mlp.down_proj,), x_nD, add=True)
        logits_nV = like.new_empty(n, len(head.weight)) if out is None else out
        self._products(x_nD, (head,), logits_nV, base.norm)
        return logits_nV

    def _gated(self, x: Tensor, norm: Any, mlp: Any, gate_up: Tensor, inner: Tensor) -> None:
        """Write the inputs of `mlp.down_proj` to `inner`."""
        matrices = _matrices(modules := (mlp.gate_proj, mlp.up_proj))
        if len(matrices) == 1 and self._by_kernel(x, modules):
            self._product(x, matrices[0], inner, norm, gate=True)
        else:
            self._products(x, modules, gate_up, norm)
            gpu.gate.silu_times(gate_up[:, : inner.shape[1]], gate_up[:, inner.shape[1] :], inner)

    def _products(self, x: Tensor, modules: Sequence[Any], out: Tensor, norm: Any = None, *, add: bool = False) -> None:
        """Write the outputs of linear modules on the same input, or on its `norm`, to `out`, one beside the other; or
        `add` them to it."""
        by_kernel, matrices = self._by_kernel(x, modules), _matrices(modules)
        if norm is not None and not by_kernel:
            normed, inverse = self._memory[1][: len(x)], self._memory[-1][: len(x)]
            gpu.norm.rms_norm(x, norm.weight, norm.variance_epsilon, normed, inverse)
            x = normed
        sizes = [out.shape[1]] if len(matrices) == 1 else [module.out_features for module in modules]
        for matrix, part in zip(matrices, out.split(sizes, dim=1), strict=True):
            if by_kernel:
                self._product(x, matrix, part, norm, add=add)
            else:
                _product(x, matrix.weight, matrix.bias, part, add)

    def _product(
        self, x: Tensor, matrix: Any, out: Tensor, norm: Any, *, gate: bool = False, add: bool = False
    ) -> None:
        weight, epsilon = getattr(norm, "weight", None), self._base.norm.variance_epsilon
        gpu.products.product(x, matrix, out, self._cache.scratch, norm=weight, epsilon=epsilon, gate=gate, add=add)

    def _by_kernel(self, x: Tensor, modules: Sequence[Any]) -> bool:
        few = len(x) <= self.most_rows and x.dtype != torch.float16
        return few or not all(type(module) is nn.Linear for module in modules)

    def _rope(self, positions: int, like: Tensor) -> Tensor:
        if positions not in self._ropes:
            position_1P = torch.arange(positions, device=like.device)[None]
            cos, sin = self._base.rotary_emb(like[None], position_1P)
            self._ropes[positions] = torch.cat([cos[0], sin[0]], dim=-1)
        return self._ropes[positions]


def _matrices(modules: Sequence[Any]) -> list[Any]:
    """Return linear modules on the same input as one matrix if they are neighbors in memory, else each."""
    biases = [module.bias for module in modules if module.bias is not None]
    if {type(module) for module in modules} in ({nn.Linear}, {Int8Linear}):
        weight = joined([module.weight for module in modules])
        bias = joined(biases) if len(biases) == len(modules) else None
        if weight is not None and (bias is not None or not biases):
            scales = [_linear_of(m).weight.quant_state.scale for m in modules if isinstance(m, Int8Linear)]
            return [gpu.products.Matrix(weight, bias, scale=joined(scales) if scales else None)]
    return [_matrix(module) for module in modules]


def _matrix(module: Any) -> Any:
    """Return a linear layer, one of bitsandbytes or peft too, as the kernel reads it."""
    adapter, linear = None, _linear_of(module)
    if linear is not module:
        found = Adapter.of(module)
        adapter = found.down, found.up, found.scale
    packed, state = None, getattr(linear.weight, "quant_state", None)
    if state is not None and not isinstance(linear, Int8Linear):
        packed = gpu.products.Packed(state.code, state.absmax, state.state2.code, state.state2.absmax, state.offset)
    return gpu.products.Matrix(linear.weight, linear.bias, packed, adapter, getattr(state, "scale", None))


def can_read(module: Any) -> bool:
    """Whether the kernel can multiply with a linear layer, also one of bitsandbytes or peft."""
    linear, half = _linear_of(module), torch.float16
    if linear is not module:
        down = Adapter.of(module).down
        if down.dtype == half or len(down) > gpu.products.MOST_RANK // (down.itemsize // 2) ** 2:
            return False
    if type(linear) in (nn.Linear, Int8Linear):
        return linear.weight.dtype != half
    return reads_packed(linear) and linear.weight.quant_state.dtype != half


def _linear_of(module: Any) -> Any:
    """Return a linear layer without its adapter."""
    return getattr(module, "base_layer", module)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
    if add:
        if bias is not None:
            out += bias
        torch.addmm(out, x, weight.t(), out=out)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
