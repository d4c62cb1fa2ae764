"""A decode step on a CPU as one call of the kernel in decoding.c, for models that `fused_step` recognizes."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.generation.cache import PagedCache, Rows
from hybrid_grpo.model.eight_bits import Int8Weight
from hybrid_grpo.model.kernels.build import run
from hybrid_grpo.model.kernels.decoding import Alike, epsilon_of, fits, norm_offset
from hybrid_grpo.model.kernels.states import WIDEST
from hybrid_grpo.model.lora import Adapter
from hybrid_grpo.model.ragged_attention import Options
from hybrid_grpo.model.towers import text_of

_ROWS = 256
"""Tokens that are read at a time."""


class _Matrix(ctypes.Structure):
    """`struct matrix` of decoding.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("w", "scales", "code")]


def _struct(pointers: str, integers: str = "", floats: str = "", matrices: str = "") -> Any:
    """Return a `struct` of decoding.c, given the names of its fields in their order."""
    kinds = (matrices, _Matrix), (pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (floats, ctypes.c_float)
    fields = [(name, kind) for names, kind in kinds for name in names.split()]
    return type("Struct", (ctypes.Structure,), {"_fields_": fields})


_DeltaNet = _struct("qkv z b a conv conv_bias dt_bias log_rate norm out conv_state state")
_Adapter = _struct("down up low", "rank")
_Layer = _struct(
    "norm q_bias k_bias v_bias q_norm k_norm o_bias mlp_norm keys values delta adapters", "window", "scale softcap",
    matrices="q k v o gate up down",
)  # fmt: skip
_Model = _struct(
    "norm head_bias layers packed",
    "count vocabulary hidden heads kv d inner page rotated gated delta_heads delta_key_heads dk dv kernel half ranks",
    "epsilon offset", matrices="embedding head",
)  # fmt: skip


class CpuStep:
    """The decode step of a recognized model, with a cache whose memory must not move."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        base, head = text_of(model), model.get_output_embeddings()
        self._rotary, self._cache = base.rotary_emb, cache
        self._deltas: list[Any] = []
        self._adapters: list[Any] = []
        self._tensors: list[Tensor | None] = []
        """What the kernel reads: float32, as copies where the model is in bfloat16, whose matrices stay as they are."""
        attended = iter(zip(cache.keys, cache.values, cache.geometry.attention, strict=True))
        self._layers = (_Layer * len(base.layers))(
            *(self._delta_layer(layer, at) if has_delta(layer) else self._attention_layer(layer, *next(attended))
              for at, layer in enumerate(base.layers))
        )  # fmt: skip
        attention = next(layer.self_attn for layer in base.layers if not has_delta(layer))
        self._vocabulary, hidden = head.weight.shape
        d, inner = attention.head_dim, base.layers[0].mlp.up_proj.out_features
        heads, kv, gated = attention.o_proj.in_features // d, attention.k_proj.out_features // d, is_gated(attention)
        deltas = (_delta_sizes(layer.linear_attn) for layer in base.layers if has_delta(layer))
        delta_heads, key_heads, dk, dv, kernel = next(deltas, (0,) * 5)
        self._rope = self._rope_of(1)
        tables, half = (self._matrix(base.embed_tokens), self._matrix(head)), base.norm.weight.dtype == torch.bfloat16
        ranks = 3 * max((adapter.rank for of_layer in self._adapters for adapter in of_layer), default=0)
        self._model = _Model(
            *tables, *self._at(base.norm.weight, head.bias), ctypes.addressof(self._layers), None, len(base.layers),
            vocabulary=self._vocabulary, hidden=hidden, heads=heads, kv=kv, d=d, inner=inner, page=cache.page,
            rotated=self._rope.shape[1] // 2, gated=gated, delta_heads=delta_heads, delta_key_heads=key_heads, dk=dk,
            dv=dv, kernel=kernel, half=half, ranks=ranks, epsilon=epsilon_of(base.norm),
            offset=norm_offset(base.norm) or 0,
        )  # fmt: skip
        mixer = heads * d * (2 + gated) + 2 * kv * d
        of_delta = 4 * key_heads * dk + 4 * delta_heads * dv + 2 * delta_heads
        self._row = 2 * hidden + 2 * inner + ranks + max(mixer, of_delta)
        self._tiled = max(hidden, inner, heads * d) // 2 if half else 0
        """Words of the widest input that the kernel packs (for AMX in tiles, which take a multiple of 16 rows)."""
        self._memory = torch.empty(0)

    def _delta_layer(self, layer: Any, at: int) -> Any:
        net, states = layer.linear_attn, self._cache.states
        self._deltas.append(_DeltaNet(
            *self._at(net.in_proj_qkv.weight, net.in_proj_z.weight, net.in_proj_b.weight, net.in_proj_a.weight),
            *self._at(net.conv1d.weight, net.conv1d.bias, net.dt_bias, net.A_log, net.norm.weight),
            *self._at(net.out_proj.weight, states.of("conv", at, 0), states.of("recurrent", at, 0)),
        ))  # fmt: skip
        norm, mlp_norm = self._at(layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        gate, up, down = (self._matrix(linear) for linear in mlp_layers(layer))
        delta = ctypes.addressof(self._deltas[-1])
        return _Layer(norm=norm, mlp_norm=mlp_norm, gate=gate, up=up, down=down, delta=delta)

    def _attention_layer(self, layer: Any, keys: Tensor, values: Tensor, options: Options) -> Any:
        linears, adapters = (*attention_layers(layer), *mlp_layers(layer)), (_Adapter * 7)()
        for index, linear in enumerate(linears):
            if hasattr(linear, "base_layer"):
                own = Adapter.of(linear)
                down, up = self._at(own.down.float(), own.scale * own.up.float().T.contiguous())
                adapters[index] = _Adapter(down, up, None, len(own.down))
        self._adapters.append(adapters)
        # Without any the threads need not meet for them.
        place = ctypes.addressof(adapters) if any(adapter.rank for adapter in adapters) else None
        q, k, v, o, *_ = linears
        norms = (getattr(getattr(layer.self_attn, name, None), "weight", None) for name in ("q_norm", "k_norm"))
        before, after = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        addresses = self._at(before, q.bias, k.bias, v.bias, *norms, o.bias, after, keys, values)
        matrices, scores = map(self._matrix, linears), (options.window, options.scale, options.softcap)
        return _Layer(*matrices, *addresses, None, place, *scores)

    def _matrix(self, linear: Any) -> _Matrix:
        weight = getattr(linear, "base_layer", linear).weight
        if isinstance(weight, Int8Weight):
            return _Matrix(*self._at(weight, weight.quant_state.scale))
        if (form := getattr(weight, "quant_state", None)) is None:
            return _Matrix(*self._at(weight))
        from bitsandbytes.functional import dequantize_blockwise

        scales = dequantize_blockwise(form.absmax, form.state2).float() + form.offset
        return _Matrix(*self._at(weight, scales, form.code))

    def _at(self, *tensors: Tensor | None) -> list[int | None]:
        self._tensors += [t.float() if t is not None and t.dim() == 1 else t for t in tensors]
        return [None if tensor is None else tensor.data_ptr() for tensor in self._tensors[-len(tensors) :]]

    def _rope_of(self, positions: int) -> Tensor:
        """Return cosines and sines, [positions, 2 * rotated]."""
        return torch.cat([t[0] for t in self._rotary(torch.empty(0), torch.arange(positions)[None])], dim=-1)

    def __call__(self, rows: Rows, alike: Alike | None = None) -> Tensor:
        """Return logits_nV after each row's token, or logits_uV after each text that is `alike` where the model has no
        states, in memory that the next call overwrites; see `decode_step`."""
        copies: tuple[Any, Any] = None, None
        if alike is not None:
            page, (begin_u, row_n) = self._cache.page, alike
            page_n = rows.table_nw.gather(1, (rows.position_n // page)[:, None])[:, 0]
            copies = begin_u, (page_n * page + rows.position_n % page)[row_n]
            first_u = row_n[begin_u[:-1]]
            table_uw, encoded_u = rows.table_nw[first_u], rows.encoded_n[first_u]
            rows = Rows(rows.token_n[first_u], table_uw, rows.position_n[first_u], rows.read, encoded_u)
        n = len(rows.token_n)
        memory = self._of_rows(n, self._row + self._vocabulary)
        logits_nV = memory[: n * self._vocabulary].view(n, self._vocabulary)
        self._run(logits_nV, memory[n * self._vocabulary :], rows, copies)
        return logits_nV

    def read(self, token_N: Tensor, table_Nw: Tensor, position_N: Tensor) -> None:
        """Store the keys and values of tokens, which may be of the same sequence, in the order of their positions."""
        for at in torch.arange(len(token_N)).split(_ROWS):
            work = self._of_rows(len(at), self._row)
            self._run(None, work, Rows(token_N[at], table_Nw[at], position_N[at], table_Nw.shape[1]))

    def _of_rows(self, n: int, numbers: int) -> Tensor:
        size = n * numbers + (n + 15) * self._tiled
        if len(self._memory) < size:
            self._memory = torch.empty(size)
        if self._tiled:
            self._model.packed = self._memory[n * numbers :].data_ptr()
        return self._memory

    def _run(self, logits_nV: Tensor | None, work: Tensor, rows: Rows, copies: tuple[Any, Any] = (None, None)) -> None:
        entries = rows.read * self._cache.page
        if len(self._rope) < entries:
            self._rope = self._rope_of(max(entries, 2 * len(self._rope)))
        rope, n, width = self._rope[rows.encoded_n], len(rows.token_n), rows.table_nw.stride(0)
        run("decode", ctypes.addressof(self._model), logits_nV, work,
            rows.token_n, rope, rows.table_nw, rows.position_n, n, width, *copies)  # fmt: skip


def has_delta(layer: Any) -> bool:
    """Whether a layer has a Gated DeltaNet in place of attention."""
    return hasattr(layer, "linear_attn")


def is_gated(attention: Any) -> bool:
    """Whether `q_proj` returns, after the query of each head, a gate for its output."""
    return bool(attention.q_proj.out_features == 2 * attention.o_proj.in_features)


def fitting(model: Any, cache: PagedCache) -> bool:
    """Whether the kernel has room for the shapes of a recognized model."""
    layers = text_of(model).layers
    attention = next(layer.self_attn for layer in layers if not has_delta(layer))
    kv, d = cache.keys[0].shape[2:]
    widths = [max(_delta_sizes(layer.linear_attn)[2:4]) for layer in layers if has_delta(layer)]
    return fits(attention.o_proj.in_features // d // kv, cache.page, d) and max(widths, default=0) <= WIDEST


def attention_layers(layer: Any) -> tuple[Any, ...]:
    attention = layer.self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj


def mlp_layers(layer: Any) -> tuple[Any, ...]:
    return layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj


def _delta_sizes(net: Any) -> tuple[int, ...]:
    """Return the numbers of heads of values and keys, the widths of keys and values, and the convolution's tokens."""
    return net.num_v_heads, net.num_k_heads, net.head_k_dim, net.head_v_dim, net.conv1d.weight.shape[-1]
