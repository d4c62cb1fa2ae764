"""Products of few rows with the weight of a linear layer on a GPU, and what a layer computes before and after them.

One program multiplies a tile of rows with some rows of the weight. Where these are few, several programs share the
inputs, and the last of them to end adds up their parts in order, so that results do not vary. A norm before the product
scales its results instead of its inputs. Weights may have four bits or eight, and an adapter: all are read here.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.attention import Scratch, dot, room
from hybrid_grpo.model.kernels.gpu.launcher import launch
from hybrid_grpo.model.kernels.gpu.tilings import tiling_of

_MOST_ROWS, _INPUTS = 128, 64
_SHARED_BYTES = 96 << 10
"""What the tiles on their way may take of a processor's memory."""
MOST_RANK = 128
"""Largest rank of an adapter in bfloat16; in float32 a quarter of it. More would not stay in registers."""
BLOCK = 64
"""Packed weights that have a scale in common."""


class Packed(NamedTuple):
    """What turns four bits into numbers: NF4 with packed scales, Dettmers et al., arXiv:2305.14314, section 3."""

    code: Tensor
    """The 16 numbers, float32."""
    scales: Tensor
    """Of each `BLOCK` weights, uint8."""
    scale_code: Tensor
    """The 256 numbers that `scales` stand for, float32."""
    scale_scales: Tensor
    """Of each 256 `scales`, float32."""
    offset: Tensor
    """Mean of the scales, which was subtracted from them; float32, one number."""


class Matrix(NamedTuple):
    """A linear layer: [outputs, inputs], perhaps packed; a bias, an adapter: A [rank, inputs], B, a factor; and, if the
    weight is int8, what multiplies each row of it."""

    weight: Tensor
    bias: Tensor | None = None
    packed: Packed | None = None
    adapter: tuple[Tensor, Tensor, float] | None = None
    scale: Tensor | None = None


@triton.jit
def _tile(matrix, line, real, width, place, inside):
    """Load the numbers at `place` of some lines of a matrix, whose lines are `width` apart."""
    return tl.load(matrix + line.to(tl.int64)[:, None] * width + place, real[:, None] & inside[None, :], 0)


@triton.jit
def _weights(matrix, line, wanted, width, place, inside, kind, SCALED: tl.constexpr):
    """Load weights, which are whole numbers if they are `SCALED`."""
    tile = _tile(matrix, line, wanted, width, place, inside)
    if SCALED:
        tile = tile.to(tl.float32)
    return tile.to(kind)


@triton.jit
def _scale(scales, scale_code, scale_scales, offset, block, inside):
    """Load the scales of some blocks of packed weights."""
    level = tl.load(scales + block, inside, 0).to(tl.int32)
    return tl.load(scale_code + level) * tl.load(scale_scales + block // 256, inside, 0.0) + tl.load(offset)


@triton.jit
def _shared(parts, arrived, squares, acc, second, GATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store what a program has; return whether it is the last of its tile, and then the sums over all, in order."""
    unit, splits = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.num_programs(2)
    line = tl.arange(0, ROWS)
    cell, size = ROWS + line[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], ROWS * (1 + COLUMNS * (1 + GATE))
    part = parts + (unit * splits + tl.program_id(2)) * size
    tl.store(part + line, squares)
    tl.store(part + cell, acc)
    if GATE:
        tl.store(part + ROWS * COLUMNS + cell, second)
    # All threads have stored before the program counts as arrived.
    tl.debug_barrier()
    last = tl.atomic_add(arrived + unit, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.debug_barrier()
        tl.store(arrived + unit, 0)
        squares, acc, second = squares * 0, acc * 0, second * 0
        for split in range(splits):
            # Past the first cache, which others do not write.
            part = parts + (unit * splits + split) * size
            squares += tl.load(part + line, cache_modifier=".cg")
            acc += tl.load(part + cell, cache_modifier=".cg")
            if GATE:
                second += tl.load(part + ROWS * COLUMNS + cell, cache_modifier=".cg")
    return last, squares, acc, second


@triton.jit(do_not_specialize=["rows", "share", "rank"])
def _product(
    out, x, weight, bias, norm, factors, code, scales, scale_code, scale_scales, offset, down, up, parts, arrived,
    x_stride, out_stride, rows, outputs, inputs, share, rank, factor, epsilon,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, PACKED: tl.constexpr,
    SCALED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    kind = x.dtype.element_ty
    split, real, wanted = tl.program_id(2), row < rows, column < outputs
    acc, second = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    low, squares = tl.zeros([ROWS, max(RANK, 16)], tl.float32), tl.zeros([ROWS], tl.float32)
    of_rank = tl.arange(0, max(RANK, 16))
    every: tl.constexpr = 2 if PACKED else 1  # two packed weights share a byte: first ones are a tile, second ones too
    for step in range(split * share, tl.minimum((split + 1) * share, tl.cdiv(inputs, INPUTS))):
        if PACKED:
            byte = step * (INPUTS // 2) + tl.arange(0, INPUTS // 2)
            pair = _tile(weight, column, wanted, inputs // 2, byte, byte >= 0).to(tl.int32)
            scale = _scale(scales, scale_code, scale_scales, offset, column * (inputs // INPUTS) + step, wanted)
        for half in tl.static_range(every):
            place = step * INPUTS + tl.arange(0, INPUTS // every) * every + half
            inside = place < inputs
            given = _tile(x, row, real, x_stride, place, inside)
            if NORM:
                value = given.to(tl.float32)
                squares += tl.sum(value * value, 1)
                given = (value * tl.load(norm + place, inside, 0.0).to(tl.float32)[None, :]).to(kind)
            if PACKED:
                bits = pair >> 4 if half == 0 else pair & 15
                tile = (tl.load(code + bits) * scale[:, None]).to(kind)
            else:
                tile = _weights(weight, column, wanted, inputs, place, inside, kind, SCALED)
            acc = dot(given, tl.trans(tile), acc)
            if GATE:
                tile = _weights(weight, outputs + column, wanted, inputs, place, inside, kind, SCALED)
                second = dot(given, tl.trans(tile), second)
            if RANK:
                low = dot(given, tl.trans(_tile(down, of_rank, of_rank < rank, inputs, place, inside).to(kind)), low)
    if SCALED:
        acc *= tl.load(factors + column, wanted, 0.0)[None, :]
        second *= tl.load(factors + outputs + column, wanted & GATE, 0.0)[None, :]
    if RANK:
        lift = tl.trans(_tile(up, column, wanted, rank, of_rank, of_rank < rank).to(kind))
        acc += factor * dot(low.to(kind), lift, tl.zeros([ROWS, COLUMNS], tl.float32))
    last = True
    if tl.num_programs(2) > 1:
        last, squares, acc, second = _shared(parts, arrived, squares, acc, second, GATE, ROWS, COLUMNS)
    if last:
        if NORM:
            inverse = tl.rsqrt(squares / inputs + epsilon)[:, None]
            acc, second = acc * inverse, second * inverse
        if BIAS:
            acc += tl.load(bias + column, wanted, 0.0).to(tl.float32)[None, :]
        if GATE:
            acc = acc.to(kind).to(tl.float32)
            acc = (acc / (1.0 + tl.exp(-acc))).to(kind).to(tl.float32) * second.to(kind).to(tl.float32)
        to = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        if ADD:
            acc += tl.load(to, real[:, None] & wanted[None, :], 0.0).to(tl.float32)
        tl.store(to, acc.to(kind), real[:, None] & wanted[None, :])


def product(
    x: Tensor, matrix: Matrix, out: Tensor, scratch: Scratch, *, norm: Tensor | None = None, epsilon: float = 0.0,
    gate: bool = False, add: bool = False,
) -> None:  # fmt: skip
    """Write a linear layer's outputs, [n, outputs], to `out`, whose rows may be parts of longer ones.

    Rounds the outputs, the inputs times the norm's weight, and what an adapter has between its matrices.

    Args:
        x: bfloat16 or float32 [n, inputs].
        scratch: see `attention.Scratch`.
        norm: weight [inputs] of the RMS norm of `x` whose results are multiplied, and its `epsilon`.
        gate: the first half of the weight's outputs is a gate: write silu(first) * second (`gate.silu_times`).
        add: add the outputs to what `out` has.
    """
    weight, bias, packed, adapter, scale = matrix
    (n, inputs), outputs = x.shape, out.shape[1]
    down, up, factor = adapter or (weight, weight, 0.0)
    rank = 0 if adapter is None else len(down)
    padded = max(16, triton.next_power_of_2(rank)) if rank else 0
    # What an adapter has between its matrices stays in registers too.
    most = {0: _MOST_ROWS, 16: 64}.get(padded, 32 if padded <= 64 else 16) * 2 // x.itemsize
    rows = max(16, min(most, triton.next_power_of_2(n)))
    columns = 128 if rows == _MOST_ROWS and not gate and packed is None else 64
    programs = tiling_of(x.device).products
    tiles, steps = triton.cdiv(outputs, columns) * triton.cdiv(n, rows), triton.cdiv(inputs, _INPUTS)
    share = triton.cdiv(steps, max(1, min(programs // tiles, steps // 4)))
    splits, numbers = triton.cdiv(steps, share), rows * (columns * (1 + gate) + 1)
    parts, arrived = room(scratch, numbers, x.device, programs) if splits > 1 else (out, out)
    in_flight = _INPUTS * ((rows + columns * (1 + gate)) * x.itemsize + padded * down.itemsize)
    launch(
        _product, (triton.cdiv(outputs, columns), triton.cdiv(n, rows), splits),
        out, x, weight, weight if bias is None else bias, weight if norm is None else norm,
        weight if scale is None else scale, *(packed or (weight,) * 5), down, up, parts, arrived,
        x.stride(0), out.stride(0), n, outputs, inputs, share, rank, factor, epsilon,
        NORM=norm is not None, BIAS=bias is not None, GATE=gate, ADD=add, PACKED=packed is not None,
        SCALED=scale is not None, RANK=padded, ROWS=rows, COLUMNS=columns, INPUTS=_INPUTS,
        num_warps=4 if rows == 16 and packed is None else 8, num_stages=min(5, max(2, _SHARED_BYTES // in_flight)),
    )  # fmt: skip
