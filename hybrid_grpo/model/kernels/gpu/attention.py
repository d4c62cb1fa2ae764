"""Attention of few new tokens over a paged cache, on a GPU.

One program computes the query heads that share a key head, for one sequence. Where there are few sequences, or some
are longer than others, several programs share the entries of one, and the last of them to end adds up their parts. How
many share is decided on the device from all lengths, once a step for all layers, so that all programs have about the
same to do and a captured CUDA graph serves all lengths.

Where a decode step asks for it, the programs also rotate their queries, and one of each sequence's writes its new key
and value to the cache before it reads them there.

Online softmax: Milakov and Gimelshein, arXiv:1805.02867. Pages: Kwon et al., arXiv:2309.06180. Splitting over the keys:
Dao et al., "Flash-Decoding for long-context inference", 2023. Rotation: Su et al., arXiv:2104.09864, in the layout and
with the roundings of transformers' Llama.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch
from hybrid_grpo.model.kernels.gpu.rotation import Turn, inverse_rms, loaded, store_new, turned
from hybrid_grpo.model.kernels.gpu.tilings import Tiling, tiling_of

_UNITS = 2048
"""Most parts that all programs of a launch write."""
_UNIT = tl.constexpr(64)
"""Entries of which the shares of programs are multiples."""
_TILE_BYTES = 32 << 10
"""Most bytes of keys and values that a program loads at a time; other such tiles are on their way meanwhile."""
_LEAST = 2
"""Units for which a program of its own is worth it, at least."""
# Chosen on an H200: benchmarks/results/gpu_attention.json. One of its multiprocessors has room for two programs with
# two tiles on their way, which also add up several parts at once, and for four with one.
_DEEP, _SHALLOW = 5, 2
"""Triton's stages with two tiles on their way and with one. Reading the table of pages first takes some of them."""
_MOST_SPLITS = 64
_PARTS = 10 << 10
"""Most numbers of parts that a program has at a time when it adds them up."""


@triton.jit
def dot(a, b, c):
    # Exact for float32; of no effect on other types.
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def _store(out, row, first, total, acc, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store the mean of the values: zero for a query that attends to nothing."""
    column = first + tl.arange(0, BLOCK)
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    there = real[:, None] & (column < WIDTH)[None, :]
    tl.store(out + row[:, None] + column[None, :], mean.to(out.dtype.element_ty), there)


@triton.jit
def _keep(part, highest, total, acc0, acc1, real, V0: tl.constexpr, V1: tl.constexpr, QUERIES: tl.constexpr):
    """Store what a program has of a sequence: the highest logit, the sums of weights and of values."""
    row, one = tl.arange(0, QUERIES), tl.full([QUERIES], 1.0, tl.float32)
    tl.store(part + row, highest)
    tl.store(part + QUERIES + row, total)
    _store(part + 2 * QUERIES, row * V0, 0, one, acc0, real, V0, V0)
    if V1:
        _store(part + QUERIES * (2 + V0), row * V1, 0, one, acc1, real, V1, V1)


@triton.jit
def _sum(values, part, first, used, real, weight, V: tl.constexpr, QUERIES: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add up the sums of values of `AT_ONCE` parts from `first` on, or up to `used`, by `weight`, [parts, QUERIES]."""
    cell = values + first * part + tl.arange(0, QUERIES)[:, None] * V + tl.arange(0, V)[None, :]
    if AT_ONCE == 1:
        return tl.load(cell, real[:, None], 0.0, cache_modifier=".cg") * tl.sum(weight, 0)[:, None]
    split = tl.arange(0, AT_ONCE)[:, None, None]
    there = (first + split < used) & real[None, :, None]
    found = tl.load(cell[None, :, :] + split * part, there, 0.0, cache_modifier=".cg")
    return tl.sum(found * weight[:, :, None], 0)


@triton.jit
def _added(parts, used, part, real, V0: tl.constexpr, V1: tl.constexpr, QUERIES: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add up the parts of a sequence, in their order. They are read past the first cache, which others do not write."""
    row = tl.arange(0, QUERIES)
    highest, total = tl.full([QUERIES], -1e30, tl.float32), tl.zeros([QUERIES], tl.float32)
    acc0, acc1 = tl.zeros([QUERIES, V0], tl.float32), tl.zeros([QUERIES, max(V1, 16)], tl.float32)
    for first in range(0, used, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        there = (split < used)[:, None] & real[None, :]
        mine = parts + split[:, None] * part + row[None, :]
        own = tl.load(mine, there, -1e30, cache_modifier=".cg")
        higher = tl.maximum(highest, tl.max(own, 0))
        shrink, weight = tl.exp2(highest - higher), tl.exp2(own - higher[None, :])
        total = total * shrink + tl.sum(tl.load(mine + QUERIES, there, 0.0, cache_modifier=".cg") * weight, 0)
        acc0 = acc0 * shrink[:, None] + _sum(parts + 2 * QUERIES, part, first, used, real, weight, V0, QUERIES, AT_ONCE)
        if V1:
            acc1 = acc1 * shrink[:, None] + _sum(
                parts + QUERIES * (2 + V0), part, first, used, real, weight, V1, QUERIES, AT_ONCE
            )
        highest = higher
    return highest, total, acc0, acc1


@triton.jit(do_not_specialize=["n", "budget", "programs", "least", "window"])
def _schedule(
    row_of, plan, position, begins, n, budget, programs, least, most, window, RAGGED: tl.constexpr, N: tl.constexpr
):
    """Write which row each of `programs` works for, or n; and of each row its first program, the units of each of its
    programs, and its first part in memory."""
    row = tl.arange(0, N)
    inside = row < n
    start = tl.load(position + row, inside, -1).to(tl.int32)
    end = start + 1
    if RAGGED:
        end = start + tl.load(begins + row + 1, inside, 0) - tl.load(begins + row, inside, 0)
    begin = tl.where(window > 0, tl.maximum(start - window + 1, 0), 0) // _UNIT
    units = tl.where(inside, tl.maximum(tl.cdiv(end, _UNIT) - begin, 0), 0)
    # About as much for each program, and no row's programs also work for another.
    target = tl.maximum(tl.cdiv(tl.sum(units), budget), least)
    share = tl.maximum(tl.cdiv(units, tl.maximum(tl.minimum(tl.cdiv(units, target), most), 1)), 1)
    used = tl.where(inside, tl.maximum(tl.cdiv(units, share), 1), 0)
    parts, ends = tl.where(used > 1, used, 0), tl.cumsum(used)
    tl.store(plan + row, ends - used, inside)
    tl.store(plan + n + row, share, inside)
    tl.store(plan + 2 * n + row, tl.cumsum(parts) - parts, inside)
    for split in range(0, tl.max(used)):
        tl.store(row_of + ends - used + split, row, split < used)
    for first in range(0, programs, N):
        program = first + row
        tl.store(row_of + program, row * 0 + n, (program >= tl.sum(used)) & (program < programs))


@triton.jit(do_not_specialize=["table_stride", "window", "n", "room"])
def _attend(
    out, query, keys, values, table, position, begins, sinks, parts, arrived, query_token, query_head, table_stride,
    key_page, key_entry, key_head, value_page, value_entry, value_head, scale, softcap, window, row_of, plan, n, room,
    rope, rotary, q_norm, k_norm, epsilon, TURN: tl.constexpr, NORM: tl.constexpr,
    RAGGED: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, QUERIES: tl.constexpr, ENTRIES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    own = tl.load(row_of + tl.program_id(0))
    row = tl.minimum(own, n - 1)
    split, share = tl.program_id(0) - tl.load(plan + row), tl.load(plan + n + row) * (_UNIT // ENTRIES)
    head, tile = tl.program_id(1), tl.program_id(2)
    first, count = row, 1
    if RAGGED:
        first = tl.load(begins + row)
        count = tl.load(begins + row + 1) - first
    start = tl.load(position + row).to(tl.int32)
    # The query heads of a key head, for one new token after the other.
    place = tile * QUERIES + tl.arange(0, QUERIES)
    token, of_group = place // GROUP, place % GROUP
    real = token < count
    at = start + token
    query_heads = tl.num_programs(1) * GROUP
    here = head * GROUP + of_group

    end = tl.minimum(start + (tile * QUERIES + QUERIES - 1) // GROUP, start + count - 1) + 1
    begin = 0
    if WINDOW:
        begin = tl.maximum(start + tile * QUERIES // GROUP - window + 1, 0)
    begin = begin // _UNIT * (_UNIT // ENTRIES)
    blocks = tl.where(tile * QUERIES < count * GROUP, tl.maximum(tl.cdiv(end, ENTRIES) - begin, 0), 0)
    used = tl.cdiv(blocks, share)

    if (own < n) & ((split < used) | ((split == 0) & (tile * QUERIES < count * GROUP))):
        at_query = (first + token).to(tl.int64) * query_token + here * query_head
        if TURN:
            turn, inverse = rope + tl.load(rotary + row) * 2 * D, tl.zeros([QUERIES], tl.float32)
            if split == used - 1:
                one, kv = tl.arange(0, QUERIES) == 0, tl.num_programs(1)
                new = row.to(tl.int64) * query_token + (query_heads + head) * D + tl.zeros([QUERIES], tl.int64)
                of_new = tl.load(table + row.to(tl.int64) * table_stride + start // PAGE).to(tl.int64)
                to_key = keys + of_new * key_page + start % PAGE * key_entry + head * key_head
                to_value = values + of_new * value_page + start % PAGE * value_entry + head * value_head
                if NORM:
                    inverse = inverse_rms(query, new, one, epsilon, D, D0, D1)
                store_new(query, new, kv * D, to_key, to_value, one, 0, turn, k_norm, inverse, D, D0, NORM)
                if D1:
                    store_new(query, new, kv * D, to_key, to_value, one, D0, turn, k_norm, inverse, D, D1, NORM)
                # All threads have stored before any reads.
                tl.debug_barrier()
            if NORM:
                inverse = inverse_rms(query, at_query, real, epsilon, D, D0, D1)
            q0 = turned(query, at_query, real, 0, turn, q_norm, inverse, D, D0, NORM)
            if D1:
                q1 = turned(query, at_query, real, D0, turn, q_norm, inverse, D, D1, NORM)
        else:
            q0 = loaded(query, at_query, real, 0, D, D0)
            if D1:
                q1 = loaded(query, at_query, real, D0, D, D1)
        highest = tl.full([QUERIES], -1e30, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        acc0, acc1 = tl.zeros([QUERIES, V0], tl.float32), tl.zeros([QUERIES, max(V1, 16)], tl.float32)
        for block in range(begin + split * share, begin + tl.minimum((split + 1) * share, blocks)):
            entry = block * ENTRIES + tl.arange(0, ENTRIES)
            inside = entry < end
            page = tl.load(table + row.to(tl.int64) * table_stride + entry // PAGE, inside, 0).to(tl.int64)
            at_key = page * key_page + entry % PAGE * key_entry + head * key_head
            k0 = loaded(keys, at_key, inside, 0, D, D0)
            logits = dot(q0, tl.trans(k0), tl.zeros([QUERIES, ENTRIES], tl.float32))
            if D1:
                logits = dot(q1, tl.trans(loaded(keys, at_key, inside, D0, D, D1)), logits)
            logits *= scale
            if SOFTCAP:
                # tanh
                small = tl.exp(tl.abs(logits) * (-2.0 / softcap))
                capped = softcap * (1.0 - small) / (1.0 + small)
                logits = tl.where(logits < 0, -capped, capped)
            seen = (entry[None, :] <= at[:, None]) & inside[None, :]
            if WINDOW:
                seen = seen & (entry[None, :] > at[:, None] - window)
            logits = tl.where(seen, logits * 1.4426950408889634, float("-inf"))
            higher = tl.maximum(highest, tl.max(logits, 1))
            weights = tl.exp2(logits - higher[:, None])
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(weights, 1)
            weights = weights.to(values.dtype.element_ty)
            at_value = page * value_page + entry % PAGE * value_entry + head * value_head
            if SHARED:
                v0 = k0
            else:
                v0 = loaded(values, at_value, inside, 0, V, V0)
            acc0 = dot(weights, v0, acc0 * shrink[:, None])
            if V1:
                acc1 = dot(weights, loaded(values, at_value, inside, V0, V, V1), acc1 * shrink[:, None])
            highest = higher

        last = True
        if used > 1:
            unit = (head * tl.num_programs(2) + tile).to(tl.int64) * room + tl.load(plan + 2 * n + row)
            size = QUERIES * (V0 + V1 + 2)
            part = parts + unit * size
            _keep(part + split * size, highest, total, acc0, acc1, real, V0, V1, QUERIES)
            # All threads have stored before the program counts as arrived.
            tl.debug_barrier()
            last = tl.atomic_add(arrived + unit, 1, sem="acq_rel", scope="gpu") == used - 1
            if last:
                tl.debug_barrier()
                tl.store(arrived + unit, 0)
                highest, total, acc0, acc1 = _added(part, used, size, real, V0, V1, QUERIES, AT_ONCE)
        if last:
            if SINKS:
                sink = tl.load(sinks + here, real, 0.0).to(tl.float32) * 1.4426950408889634
                total = tl.where(total > 0, total + tl.exp2(tl.minimum(sink - highest, 126.0)), 0.0)
            to = ((first + token).to(tl.int64) * query_heads + here) * V
            _store(out, to, 0, total, acc0, real, V, V0)
            if V1:
                _store(out, to, V0, total, acc1, real, V, V1)


def _halves(width: int) -> tuple[int, int]:
    """Return two powers of two, or one and 0, which add up to at least `width`."""
    first = max(16, 1 << width.bit_length() - 1)
    return first, max(16, triton.next_power_of_2(width - first)) if width > first else 0


Scratch = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""Memory in which the programs of a launch leave their parts, by how many there may be and the numbers of each; kept
from launch to launch. Only launches that follow each other on one stream can share it."""


def room(scratch: Scratch, numbers: int, device: torch.device, units: int = _UNITS) -> tuple[Tensor, Tensor]:
    """Return room for as many parts of `numbers` float32 as a launch may have, and counters (int32) that are 0."""
    if (units, numbers) not in scratch:
        parts = torch.empty(units * numbers, dtype=torch.float32, device=device)
        scratch[units, numbers] = parts, torch.zeros(units, dtype=torch.int32, device=device)
    return scratch[units, numbers]


def _stages(entry_bytes: int, itemsize: int, programs: int, few: int) -> tuple[int, int]:
    """Return the number of entries that each of `programs` loads at once, and Triton's stages."""
    entries = min(max(16, 1 << (_TILE_BYTES // entry_bytes).bit_length() - 1), 64 if itemsize == 2 else 16)
    return entries, _DEEP if programs <= few // 2 and entries * entry_bytes <= _TILE_BYTES else _SHALLOW


def _shares(n: int, heads: int, tiling: Tiling) -> tuple[int, int]:
    """Return how many programs share all entries of a head, for each of the `heads` of n sequences, and the least units
    of each. Many end at different times, so that there are twice as many as run at a time."""
    programs = tiling.few if n * heads <= tiling.few // 2 else 2 * tiling.many
    return max(1, min(programs, _UNITS // 2) // heads), max(_LEAST, n * heads // 16)


def _scheduled(position: Tensor, begins: Tensor | None, window: int, budget: int, least: int) -> tuple[Tensor, Tensor]:
    """Return the `row_of` and the `plan` that `_schedule` writes."""
    n = len(position)
    row_of, plan = (torch.empty(size, dtype=torch.int32, device=position.device) for size in (n + budget, 3 * n))
    launch(
        _schedule, (1,), row_of, plan, position, position if begins is None else begins, n, budget, n + budget, least,
        _MOST_SPLITS, window, RAGGED=begins is not None, N=triton.next_power_of_2(n),
    )  # fmt: skip
    return row_of, plan


def _begin_together(keys: Tensor, values: Tensor) -> bool:
    """Whether values are the first numbers of the keys."""
    same_memory = keys.untyped_storage()._cdata == values.untyped_storage()._cdata
    return same_memory and (keys.storage_offset(), keys.stride()) == (values.storage_offset(), values.stride())


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, position: Tensor, scale: float, window: int,
    softcap: float, sinks: Tensor | None, scratch: Scratch, begins: Tensor | None = None, longest: int = 1,
    budget: int | None = None, least: int | None = None, out: Tensor | None = None, turn: Turn | None = None,
    schedules: dict[Any, tuple[Tensor, Tensor]] | None = None,
) -> Tensor:  # fmt: skip
    """Compute the causal attention of the last tokens of sequences, whose keys and values are in the cache already.
    Returns [N, heads, value_dim]; zeros for a sequence without entries.

    Args:
        query: [N, heads, head_dim], of each sequence's new tokens in order; by default one for each.
        keys: [pages, page, kv, head_dim], a layer's cache; values: [pages, page, kv, value_dim]. Values may be the
            first numbers of the keys, as latents are.
        table: int32 [n, width], the pages of each sequence.
        position: int64 [n], of each sequence's first new token; -1 for a sequence without entries.
        scale, window, softcap, sinks: see `model.ragged_attention.Options`.
        scratch: see `Scratch`.
        begins: int32 [n + 1], the offsets of each sequence's first query; `longest`: the most queries of a sequence.
        budget: about as many programs share all sequences, each at least `least` * 64 entries of one. Default: what
            keeps a GPU busy.
        out: contiguous memory for the result.
        turn: `query` is a part of its products, and the entry at `position` is still to be written.
        schedules: keeps what programs do for further calls with the same sequences.
    """
    (_, heads, d), (_, page, kv, v) = query.shape, values.shape
    n, group = len(table), heads // kv
    most = 16 if keys.itemsize > 2 or max(d, v) > 256 else 32
    queries = min(max(16, triton.next_power_of_2(group * longest)), most)  # of a program
    tiles = -(-group * longest // queries)
    programs = n * kv * tiles
    tiling, schedules = tiling_of(query.device), {} if schedules is None else schedules
    budget, least = (wanted or of for wanted, of in zip((budget, least), _shares(n, kv * tiles, tiling), strict=True))
    if (key := (window, budget)) not in schedules:
        schedules[key] = _scheduled(position, begins, *key, least)
    row_of, plan = schedules[key]
    query = query if query.stride(2) == 1 else query.contiguous()
    (d0, d1), (v0, v1) = _halves(d), _halves(v)
    entries, stages = _stages((d0 + d1 + v0 + v1) * keys.itemsize, keys.itemsize, programs, tiling.few)
    # Parts that are loaded beside their sum: a power of two.
    at_once = 1 << max(1, _PARTS // (queries * max(v0, v1)) - 1).bit_length() - 1 if stages == _DEEP else 1
    shares = v == v0 == d0 and _begin_together(keys, values)
    if out is None:
        out = torch.empty(len(query), heads, v, dtype=query.dtype, device=query.device)
    _, rope, rotary, norms, epsilon = turn or Turn(query, query, position)
    parts, arrived = room(scratch, queries * (v0 + v1 + 2), query.device)
    launch(
        _attend, (len(row_of), kv, tiles), out, query, keys, values, table, position,
        table if begins is None else begins, out if sinks is None else sinks, parts, arrived,
        query.stride(0), query.stride(1), table.stride(0), *keys.stride()[:3], *values.stride()[:3],
        scale, softcap, window, row_of, plan, n, 2 * budget, rope, rotary, *(norms or (rope, rope)), epsilon,
        TURN=turn is not None, NORM=norms is not None,
        RAGGED=begins is not None, SINKS=sinks is not None, SOFTCAP=softcap > 0, WINDOW=window > 0,
        SHARED=shares, GROUP=group, PAGE=page, QUERIES=queries, ENTRIES=entries,
        AT_ONCE=at_once, D=d, D0=d0, D1=d1, V=v, V0=v0, V1=v1,
        num_warps=4 if queries * (v0 + v1) < 8192 and keys.itemsize == 2 else 8, num_stages=stages,
    )  # fmt: skip
    return out
