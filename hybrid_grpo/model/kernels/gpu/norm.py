"""Residual and RMS norm on a GPU, and their gradient: a program reads each of its rows once."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

WIDEST = 8192
"""The most elements of a row: more would not stay in registers."""
_TILE = 1024
"""Least elements that a program computes at once: short rows, such as heads, share a program."""
_PROGRAMS = 512
"""Most programs of a gradient. Each adds up the weight's gradient over its rows."""


class Formula(NamedTuple):
    """The root mean square layer normalization of a model: (offset + weight) * x / rms(x)."""

    epsilon: float
    offset: float = 0.0
    """Gemma adds 1 to its weights."""
    rounds: bool = True
    """Whether x / rms(x) is rounded before it is multiplied by the weight, as Llama does."""


@triton.jit
def _add_norm(
    out, total, inverses, x, residual, weight, x_stride, residual_stride, rows, size, epsilon,
    ADD: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, column = row[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (at < rows) & (column < size)
    value = tl.load(x + at * x_stride + column, mask=inside, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + at * residual_stride + column, mask=inside, other=0.0)).to(
            value.dtype
        )
        tl.store(total + at * size + column, value, mask=inside)
    value = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1) / size + epsilon)
    tl.store(inverses + row, inverse, mask=row < rows)
    scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + OFFSET
    normed = value * inverse[:, None]
    if ROUND:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at * size + column, (normed * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_backward(
    dx, dweights, dout, dtotal, total, inverses, weight, dout_stride, dtotal_stride, total_stride, rows, size, tiles,
    programs,
    ADD: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, TRAIN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program, column = tl.program_id(0), tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32) + OFFSET
    dweight = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(program, tiles, programs):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        at = row[:, None]
        inside = (at < rows) & (column < size)
        inverse = tl.load(inverses + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(total + at * total_stride + column, mask=inside, other=0.0).to(tl.float32) * inverse
        gradient = tl.load(dout + at * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
        if TRAIN:
            if ROUND:
                dweight += gradient * normed.to(dx.dtype.element_ty).to(tl.float32)
            else:
                dweight += gradient * normed
        gradient = gradient * scale
        gradient = (gradient - normed * (tl.sum(gradient * normed, axis=1) / size)[:, None]) * inverse
        if ADD:
            gradient += tl.load(dtotal + at * dtotal_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at * size + column, gradient.to(dx.dtype.element_ty), mask=inside)
    if TRAIN:
        place = tl.arange(0, BLOCK)
        tl.store(dweights + tl.cast(program, tl.int64) * size + place, tl.sum(dweight, axis=0), mask=place < size)


def _rows(x: Tensor) -> Tensor:
    """x as [rows, size]; its rows may be apart, but the elements of each are neighbors."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _tile(size: int, elements: int) -> dict[str, int]:
    """The options of a program: its rows, and about this many `elements` for a thread."""
    block = triton.next_power_of_2(size)
    rows = max(1, _TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(32, max(4, rows * block // (32 * elements)))}


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, formula: Formula,
    to: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `AddNorm` does, and 1 / rms of each row, float32 [rows]; in the memory of `to`, if given."""
    size, flat = x.shape[-1], _rows(x)
    other, tile = flat if residual is None else _rows(residual), _tile(size, 8)
    if to is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = x if residual is None else torch.empty_like(out)
        to = total, out, torch.empty(len(flat), dtype=torch.float32, device=x.device)
    total, out, inverse = to
    launch(
        _add_norm, (triton.cdiv(len(flat), tile["ROWS"]),),
        out, total, inverse, flat, other, weight, flat.stride(0), other.stride(0), len(flat), size, formula.epsilon,
        ADD=residual is not None, OFFSET=formula.offset, ROUND=formula.rounds, **tile,
    )  # fmt: skip
    return total, out, inverse


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor, inverse: Tensor) -> None:
    """Write the norm of each row of x, [n, size], as a Llama layer computes it, to `out`, and 1 / rms, float32 [n]."""
    _forward(x, None, weight, Formula(epsilon), (x, out, inverse))


class AddNorm(torch.autograd.Function):
    """Returns the sum x + residual (x itself without a residual), and the norm of the sum, both shaped like x.

    Root mean square layer normalization: Zhang and Sennrich, arXiv:1910.07467. Rounds where the model's layer rounds.

    Args: x, residual (or None): [..., size]; weight: [size]; `Formula`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, formula: Formula) -> tuple[Tensor, ...]:
        total, out, inverse = _forward(x, residual, weight, formula)
        ctx.set_materialize_grads(False)
        ctx.formula, ctx.adds = formula, residual is not None
        ctx.save_for_backward(total, inverse, weight)
        return total, out

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        total, inverse, weight = ctx.saved_tensors
        if dout is None:
            return dtotal, dtotal if ctx.adds else None, None, None
        flat, grad = _rows(total), _rows(dout)
        more = grad if dtotal is None else _rows(dtotal)
        (rows, size), tile, train = flat.shape, _tile(total.shape[-1], 16), ctx.needs_input_grad[2]
        tiles = triton.cdiv(rows, tile["ROWS"])
        programs = min(tiles, _PROGRAMS)
        dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
        # Zeros where there are no rows, and with them no programs.
        dweights = torch.empty(programs if train else 0, size, dtype=torch.float32, device=total.device)
        launch(
            _add_norm_backward, (programs,),
            dx, dweights, grad, more, flat, inverse, weight, grad.stride(0), more.stride(0), flat.stride(0),
            rows, size, tiles, programs,
            ADD=dtotal is not None, OFFSET=ctx.formula.offset, ROUND=ctx.formula.rounds, TRAIN=train, **tile,
        )  # fmt: skip
        dweight = dweights.sum(0).to(weight.dtype) if train else None
        return dx, dx if ctx.adds else None, dweight, None
