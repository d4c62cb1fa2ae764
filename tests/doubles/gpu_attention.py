"""Doubles of the attention kernels of GPUs: they check the rules of the real ones, and compute on any device.

The rules are those of torch 2.13's `varlen_attn` on top of FlashAttention-2, of flash-attn 2.8, and of the package's
own kernel for pages. A call that the real kernel would refuse raises here.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest

from hybrid_grpo.commands import description
from hybrid_grpo.generation import paged_attention as decoding
from hybrid_grpo.model import attention
from hybrid_grpo.model import ragged_attention as ragged
from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.kernels.gpu.launcher import proven
from hybrid_grpo.model.ragged_attention import with_sinks

_HALF = (torch.bfloat16, torch.float16)


def _check(rule: bool, text: str) -> None:
    if not rule:
        raise RuntimeError(text)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, heads: int) -> None:
    _check(query.dtype in _HALF, "FlashAttention only supports fp16 and bf16 data type")
    _check(query.dtype == key.dtype == value.dtype, "query, key and value must have the same dtype")
    _check(all(x.stride(-1) == 1 for x in (query, key, value)), "the last dimension must be contiguous")
    _check(query.shape[-1] % 8 == 0 and query.shape[-1] <= 256, "head_dim must be a multiple of 8, at most 256")
    _check(query.shape[-2] % heads == 0, "query heads must be a multiple of key heads")


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, left: int, right: int, softcap: float = 0.0
) -> Tensor:
    """One sequence in float32: [q, heads, d] over [k, kv, d]; the last query stands at the last key."""
    return _attend_lse(query, key, value, scale, left, right, softcap)[0]


def _logits(query: Tensor, key: Tensor, scale: float, left: int, right: int, softcap: float = 0.0) -> Tensor:
    q, k = query.float(), key.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        logits = (logits / softcap).tanh() * softcap
    distance = torch.arange(len(k)) - (torch.arange(len(q)) + len(k) - len(q))[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= distance <= right if right >= 0 else True
    seen &= distance >= -left if left >= 0 else True
    return logits.masked_fill(~seen, float("-inf"))


def _attend_lse(query: Tensor, key: Tensor, value: Tensor, *options) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of the sum of exponentials of the logits, [heads, q]."""
    logits = _logits(query, key, *options)
    v = value.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v).to(query.dtype), logits.logsumexp(-1)


def _begins(cumulative: Tensor, longest: int, what: str) -> list[tuple[int, int]]:
    _check(cumulative.dtype == torch.int32 and cumulative.is_contiguous(), f"cu_seq_{what} must have dtype int32")
    edges = cumulative.tolist()
    spans = list(pairwise(edges))
    _check(edges[0] == 0 and all(a <= b <= a + longest for a, b in spans), f"max_{what} is less than a length")
    return spans


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False,
):  # fmt: skip
    """torch.nn.attention.varlen.varlen_attn."""
    heads = key.shape[-2]
    _check_tensors(query, key, value, heads)
    _check(enable_gqa or query.shape[1] == heads, "Try setting enable_gqa=True for GQA.")
    _check(cu_seq_k is not None, "FA2 requires cu_seq_k")
    _check(cu_seq_k is not cu_seq_q, "torch 2.15 would take cuDNN")
    queries = _begins(cu_seq_q, max_q, "q")
    _check(queries[-1][1] == len(query), "cu_seq_q must end at the number of queries")
    left, right = window_size
    spans = _begins(cu_seq_k, max_k, "k")
    _check(spans[-1][1] == len(key) == len(value), "cu_seq_k must end at the number of keys")
    pairs = [(key[a:b], value[a:b]) for a, b in spans]
    parts = [_attend_lse(query[a:b], k, v, scale, left, right) for (a, b), (k, v) in zip(queries, pairs, strict=True)]
    out, lse = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)
    return (out, lse.detach()) if return_aux else out


def varlen_attn_backward(
    grad, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, state, scale, window_size
):
    """torch_attn::_varlen_attn_backward, which takes the weights from `lse` and the mean gradient from `out`."""
    _check_tensors(query, key, value, key.shape[1])
    _check(is_causal == (tuple(window_size) == (-1, 0)) and lse.shape == (query.shape[1], len(query)), "its options")
    group, gradients = query.shape[1] // key.shape[1], []
    for (a, b), (c, d) in zip(_begins(cu_seq_q, max_q, "q"), _begins(cu_seq_k, max_k, "k"), strict=True):
        q, g, k, v = query[a:b].float(), grad[a:b].float(), key[c:d].float(), value[c:d].float()
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        weights = (_logits(query[a:b], key[c:d], scale, *window_size) - lse[:, a:b, None]).exp()
        mean = (g * out[a:b].float()).sum(-1).T[..., None]
        dlogits = weights * (torch.einsum("qhd,khd->hqk", g, v) - mean) * scale
        dq = torch.einsum("hqk,khd->qhd", dlogits, k)
        dk, dv = torch.einsum("hqk,qhd->khd", dlogits, q), torch.einsum("hqk,qhd->khd", weights, g)
        gradients.append((dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))))
    return tuple(torch.cat(parts).to(query.dtype) for parts in zip(*gradients, strict=True))


def varlen_attn_of_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """The same in torch 2.11, which hands on whatever key heads it is given."""
    places = query, key, value, cu_seq_q, cu_seq_k, max_q, max_k
    return varlen_attn(*places, return_aux=return_aux, scale=scale, window_size=window_size, enable_gqa=True)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, window_size, softcap
):
    """flash_attn.flash_attn_varlen_func."""
    _check_tensors(q, k, v, k.shape[1])
    queries = _begins(cu_seqlens_q, max_seqlen_q, "q")
    keys = _begins(cu_seqlens_k, max_seqlen_k, "k")
    left, right = window_size[0], 0 if causal else window_size[1]
    return torch.cat(
        [
            _attend(q[a:b], k[c:d], v[c:d], softmax_scale, left, right, softcap)
            for (a, b), (c, d) in zip(queries, keys, strict=True)
        ]
    )


def paged_attention(
    query, keys, values, table, position, scale, window, softcap, sinks, scratch, begins=None, longest=1, budget=None,
    out=None, turn=None, schedules=None,
):  # fmt: skip
    """hybrid_grpo.model.kernels.gpu.attention.paged_attention."""
    if turn is not None:
        query = _turned(query.shape[1], keys, values, table, position, turn)
    _check(all(x.stride(-1) == 1 for x in (keys, values, table)), "rows are contiguous")
    _check(table.dtype == torch.int32 and position.dtype == torch.int64, "types of the table and the positions")
    _check(query.dtype == keys.dtype == values.dtype and len(table) == len(position), "what belongs together")
    _check(begins is None or begins.dtype == torch.int32, "offsets are int32")
    edges = list(range(len(table) + 1)) if begins is None else begins.tolist()
    _check(edges[-1] == len(query) and all(b - a <= longest for a, b in pairwise(edges)), "queries of each sequence")
    lefts = window - 1 if window else -1
    rows = []
    for (a, b), pages, first in zip(pairwise(edges), table.long(), position.tolist(), strict=True):
        found = [pool[pages].flatten(0, 1)[: first + b - a] for pool in (keys, values)]
        part, lse = _attend_lse(query[a:b], *found, scale, lefts, 0, softcap)
        rows.append(part if sinks is None else with_sinks(part, lse.T, sinks))
    found = torch.cat(rows)
    return found if out is None else out.copy_(found)


def _turned(heads, keys, values, table, position, turn):
    """The rotated queries, once the new keys and values are in the cache."""
    page, kv, d = keys.shape[1:]
    parts = turn.qkv.view(len(position), -1, d).split([heads, kv, kv], dim=1)
    cos, sin = turn.rope[turn.rotary][:, None].split(d, dim=-1)
    turned = []
    for x, weight in zip(parts, turn.norms or (None, None), strict=False):
        if weight is not None:
            x = (x * (x.double().square().mean(-1, keepdim=True) + turn.epsilon).rsqrt()).to(x.dtype) * weight
        first, second = x.chunk(2, dim=-1)
        turned.append(x * cos + torch.cat([-second, first], -1) * sin)
    place = table.gather(1, (position // page)[:, None])[:, 0].long(), position % page
    keys[place], values[place] = turned[1], parts[2]
    return turned[0]


def install(monkeypatch, *, flash: bool, torch_kernel=varlen_attn) -> None:
    """Let tensors in half precision take the way that they take on a GPU, with flash-attn or with torch's kernel."""
    monkeypatch.setattr(ragged, "varlen", lambda: SimpleNamespace(varlen_attn=torch_kernel, AuxRequest=AuxRequest))
    monkeypatch.setattr(gpu.attention, "paged_attention", paged_attention)
    for module in (attention, ragged, decoding, description):
        monkeypatch.setattr(module, "on_gpu", lambda device: True)
    monkeypatch.setattr(ragged, "varlen_backward", lambda: varlen_attn_backward)
    monkeypatch.setattr(ragged, "flash_attn_varlen_func", flash_attn_varlen_func if flash else None)
    # What was found of other kernels does not hold for these.
    proven.cache_clear()
