"""Fused decode steps for models that compute what Llama does: one C call on a CPU, Triton kernels on a GPU.

In float32, attention may have a gate, and Gated DeltaNets may take its place, as in Qwen3.5. Models are tested rather
than listed: a model with exactly the parts of such a model decodes a few tokens both ways, and the fused step is used
only if the logits agree. Prefills use the model's own forward, except for short texts on a CPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.activations import SiLUActivation

from hybrid_grpo.generation.cache import PagedCache, Rows
from hybrid_grpo.generation.cpu_step import CpuStep, attention_layers, fitting, has_delta, is_gated, mlp_layers
from hybrid_grpo.generation.gpu_step import GpuStep, can_read
from hybrid_grpo.generation.paged_attention import decode_step, has_kernel
from hybrid_grpo.model.eight_bits import Int8Linear
from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.kernels.build import usable
from hybrid_grpo.model.kernels.decoding import epsilon_of
from hybrid_grpo.model.lora import Adapter, reads_packed
from hybrid_grpo.model.towers import text_of

_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_MLP = {
    *("mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn"),
    *("input_layernorm", "post_attention_layernorm"),
}
_ATTENTION = {"self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
_HEAD_NORMS = {"self_attn.q_norm", "self_attn.k_norm"}
_DELTA = {
    *("linear_attn", "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_b"),
    *("linear_attn.in_proj_a", "linear_attn.conv1d", "linear_attn.norm", "linear_attn.out_proj"),
}
_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on the position only. A model whose layers have different ones has a dict of names."""
_FAR = 1 << 17
"""A test position beyond 8,192 and 16,384, after which some models scale their attention by position."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}
"""Largest root mean square difference of the logits, relative to their standard deviation: the effect of rounding in a
few dozen layers. A step that omits anything differs by as much as the logits themselves vary."""
_FEW = 8
"""Layers, a period of any known pattern, that are compared in half precision: through all 30 of SmolLM2 its rounding
alone moves the logits after a first token by half of their standard deviation."""

_REPEATS = 1, 8, 22
"""A GPU's kernels differ by the number of rows: for up to 16, for up to 32, and for more."""

_agreed: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""What makes the step of a model; None if no step agrees with it."""


def fused_step(model: Any, cache: PagedCache) -> CpuStep | GpuStep | None:
    """Return the fused decode step of a model with unsharded weights; None if the model cannot use one."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    on_gpu = gpu.usable(*parameters)
    half = on_gpu or usable(*parameters, dtype=torch.bfloat16)
    if not (half or usable(*parameters)) or not _looks_right(model, cache, on_gpu):
        return None
    if (half and not _is_llama(model)) or not (_has_kernels if on_gpu else fitting)(model, cache):
        return None
    if model not in _agreed:
        base, name = text_of(model), f"decoding {type(model).__name__}"
        layers = base.layers
        base.layers = layers[: _FEW if half else None]
        try:
            if on_gpu:
                most_rows = gpu.tilings.tiling_of(cache.device).most_rows
                ways = (partial(GpuStep, most_rows=most) for most in (most_rows, 0))
                _agreed[model] = next((w for w in ways if gpu.tried(name, partial(_agrees, w, model, cache))), None)
            else:
                _agreed[model] = CpuStep if _agrees(CpuStep, model, cache) else None
        finally:
            base.layers = layers
    return None if _agreed[model] is None else _agreed[model](model, cache)


def _looks_right(model: Any, cache: PagedCache, on_gpu: bool) -> bool:
    base, head = text_of(model), model.get_output_embeddings()
    if {name for name, _ in base.named_children()} != _MODEL or type(head) not in (nn.Linear, Int8Linear):
        return False
    layers = list(base.layers)
    if not cache.keys or not all(_layer_looks_right(layer, base.norm, on_gpu) for layer in layers):
        return False
    kv, d = cache.keys[0].shape[2:]
    with_attention = [layer for layer in layers if not has_delta(layer)]
    return (
        type(base.embed_tokens) is nn.Embedding
        # Some have a type of rotary embedding for each kind of layer.
        and str(getattr(base.rotary_emb, "rope_type", None)) in _ROPE
        and len({_shapes(attention_layers(layer)) for layer in with_attention}) == 1
        and len({_shapes(mlp_layers(layer)) for layer in layers}) == 1
        and all(pool.shape[2:] == (kv, d) for pool in cache.keys + cache.values)
        and len(cache.keys) == len(with_attention)
        and with_attention[0].self_attn.head_dim == d
        and all(parameter.is_contiguous() for parameter in model.parameters())
    )


def _has_kernels(model: Any, cache: PagedCache) -> bool:
    layers, (kv, d) = text_of(model).layers, cache.keys[0].shape[2:]
    group = layers[0].self_attn.o_proj.in_features // d // kv
    of_layers = zip(cache.keys, cache.values, cache.geometry.attention, strict=True)
    return all(has_kernel(*cache.place, keys, values, group, options) for keys, values, options in of_layers)


def _layer_looks_right(layer: Any, norm: Any, on_gpu: bool) -> bool:
    parts = {name: part for name, part in layer.named_modules() if name and "_proj." not in name}
    linears = [part for name, part in parts.items() if name.endswith("_proj") or "in_proj" in name]
    norms = [part for name, part in parts.items() if name.endswith("norm")]
    mixer = _DELTA if has_delta(layer) else _ATTENTION
    return (
        parts.keys() - _HEAD_NORMS == _MLP | mixer
        and all(type(x) in (nn.Linear, Int8Linear) or (not has_delta(layer) and _can_read(x, on_gpu)) for x in linears)
        and layer.mlp.gate_proj.bias is layer.mlp.up_proj.bias is layer.mlp.down_proj.bias is None
        and isinstance(layer.mlp.act_fn, (nn.SiLU, SiLUActivation))
        and (has_delta(layer) or hasattr(layer.self_attn, "head_dim"))
        # A bias that the kernel leaves out may be 0 when it is compared, and learn later.
        and not (has_delta(layer) and any(linear.bias is not None for linear in linears))
        and all(epsilon_of(part) == epsilon_of(norm) is not None for part in norms)
    )


def _can_read(linear: Any, on_gpu: bool) -> bool:
    base = getattr(linear, "base_layer", linear)
    return can_read(linear) if on_gpu else type(base) in (nn.Linear, Int8Linear) or reads_packed(base)


def _shapes(linears: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    return tuple((linear.in_features, linear.out_features) for linear in linears)


def _is_llama(model: Any) -> bool:
    """Whether a model that looks right has no part that the steps in half precision lack."""
    base = text_of(model)
    return hasattr(base.norm, "variance_epsilon") and not any(
        has_delta(layer) or is_gated(layer.self_attn) for layer in base.layers
    )


@contextmanager
def _adapted(model: Any) -> Iterator[None]:
    """A context in which adapters add something, as they will when B is no longer 0."""
    ups = [Adapter.of(module).up.data for module in model.modules() if hasattr(module, "base_layer")]
    own = [up.clone() for up in ups]
    for up in ups:
        up.normal_(std=0.1, generator=torch.Generator(up.device).manual_seed(0))
    try:
        yield
    finally:
        for up, kept in zip(ups, own, strict=True):
            up.copy_(kept)


def _agrees(way: Any, model: Any, like: PagedCache) -> bool:
    """Whether the fused step computes the model's logits.

    Compares them on three sequences, at the first three positions and at a far one, as some models scale by position.
    """
    far = min(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _FAR, _FAR) - 1
    device = like.device
    own, other = (PagedCache(like.geometry, 7, like.page, device, 3, 3) for _ in range(2))
    table = torch.zeros(3, far // like.page + 1, dtype=torch.int32, device=device)
    table[:, 0] = torch.arange(1, 4)
    table[:, -1] = torch.arange(4, 7)
    with _adapted(model):
        step = way(model, other)
        for at in (0, 1, 2, far):
            position, token = torch.full((3,), at, device=device), torch.tensor([1, 2, 0], device=device) + at % 7
            # As after a picture: fewer positions than entries.
            expected = decode_step(model, own, Rows(token, table, position, table.shape[1], position // 2)).float()
            for times in _REPEATS[: None if isinstance(step, GpuStep) else 1]:
                at_n = position.repeat(times)
                rows = Rows(token.repeat(times), table.repeat(times, 1), at_n, table.shape[1], at_n // 2)
                logits = step(rows)[-3:].float()
                gap = (logits - expected).square().mean().sqrt() / expected.std()
                if not gap <= TOLERANCE[like.geometry.dtype]:
                    return False
    return True
