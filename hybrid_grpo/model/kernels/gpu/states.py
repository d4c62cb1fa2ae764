"""One new token through layers that carry a state, on a GPU: each state is read and written once, in place.

torch computes such a step with a dozen operations on the whole state. The kernels compute in float32, and round where
transformers' functions do, or less often.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_grpo.model.kernels.gpu.launcher import launch

_CHANNELS = 256
"""Channels of a convolution that a program computes."""
_STATE = 4096
"""Most numbers of a state that a program holds: 32 for each of its threads."""


@triton.jit
def _convolve(
    out, x, state, weight, bias, x_stride, channels,
    BIAS: tl.constexpr, SILU: tl.constexpr, SIZE: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    channel, tap = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TAPS)
    inside = channel < channels
    there = inside[:, None] & (tap < SIZE)[None, :]
    taps = tl.load(weight + channel[:, None] * SIZE + tap[None, :], mask=there, other=0.0).to(tl.float32)
    window_of = state + channel[:, None].to(tl.int64) * SIZE + tap[None, :]
    row = tl.program_id(0).to(tl.int64)
    # The window moves by one token.
    window_of += row * channels * SIZE
    window = tl.load(window_of + 1, mask=there & (tap < SIZE - 1)[None, :], other=0.0)
    new = tl.load(x + row * x_stride + channel, mask=inside, other=0.0)
    window = tl.where((tap == SIZE - 1)[None, :], new[:, None].to(window.dtype), window)
    # Other threads may still have to read what a thread is about to write.
    tl.debug_barrier()
    tl.store(window_of, window, mask=there)
    total = tl.sum(window.to(weight.dtype.element_ty).to(tl.float32) * taps, 1)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    total = total.to(weight.dtype.element_ty).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row * channels + channel, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def _delta(
    out, state, query, key, value, log_decay, beta, query_stride, key_stride, value_stride, scale, heads, dk, dv,
    UNIT: tl.constexpr, BY_CHANNEL: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    k_at, v_at = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    in_key, in_value = k_at < dk, v_at < dv
    there = in_key[:, None] & in_value[None, :]
    row = tl.program_id(0).to(tl.int64)
    at = row * heads + head
    own = state + at * dk * dv + k_at[:, None] * dv + v_at[None, :]
    s = tl.load(own, mask=there, other=0.0).to(tl.float32)
    q = tl.load(query + row * query_stride + head // GROUP * dk + k_at, mask=in_key, other=0.0).to(tl.float32)
    k = tl.load(key + row * key_stride + head // GROUP * dk + k_at, mask=in_key, other=0.0).to(tl.float32)
    v = tl.load(value + row * value_stride + head * dv + v_at, mask=in_value, other=0.0).to(tl.float32)
    if UNIT:
        q, k = _unit(q), _unit(k)
    if BY_CHANNEL:
        s *= tl.exp(tl.load(log_decay + at * dk + k_at, mask=in_key, other=0.0).to(tl.float32))[:, None]
    else:
        s *= tl.exp(tl.load(log_decay + at).to(tl.float32))
    change = (v - tl.sum(s * k[:, None], 0)) * tl.load(beta + at).to(tl.float32)
    s += k[:, None] * change[None, :]
    tl.store(own, s.to(state.dtype.element_ty), mask=there)
    result = tl.sum(s * (q * scale)[:, None], 0)
    tl.store(out + at * dv + v_at, result.to(out.dtype.element_ty), mask=in_value)


@triton.jit
def _mamba(
    out, state, x, step, a, b, c, skip, x_stride, b_stride, c_stride, heads, d, size,
    SKIP: tl.constexpr, BY_CHANNEL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    channel, number = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE)
    inside, of_state = channel < d, number < size
    there = inside[:, None] & of_state[None, :]
    row = tl.program_id(0).to(tl.int64)
    at = (row * heads + head) * d + channel
    own = state + at[:, None] * size + number[None, :]
    s = tl.load(own, mask=there, other=0.0).to(tl.float32)
    dt = tl.load(step + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_stride + head * d + channel, mask=inside, other=0.0).to(tl.float32)
    into = tl.load(b + row * b_stride + head // GROUP * size + number, mask=of_state, other=0.0).to(tl.float32)
    from_ = tl.load(c + row * c_stride + head // GROUP * size + number, mask=of_state, other=0.0).to(tl.float32)
    if BY_CHANNEL:
        rate = tl.load(a + (head * d + channel)[:, None] * size + number[None, :], mask=there, other=0.0)
        s *= tl.exp(dt[:, None] * rate.to(tl.float32))
    else:
        s *= tl.exp(dt * tl.load(a + head).to(tl.float32))[:, None]
    s += (dt * value)[:, None] * into[None, :]
    tl.store(own, s.to(state.dtype.element_ty), mask=there)
    result = tl.sum(s * from_[None, :], 1)
    if SKIP and BY_CHANNEL:
        result += value * tl.load(skip + head * d + channel, mask=inside, other=0.0).to(tl.float32)
    elif SKIP:
        result += value * tl.load(skip + head).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def _part(numbers: int, most: int) -> int:
    """Return how many of `most` rows of a state a program holds, if each has `numbers`: a power of two."""
    return max(1, min(triton.next_power_of_2(most), _STATE // numbers))


def causal_convolution(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """Return the causal convolution of one new token of each sequence, [n, C].

    Args: x: [n, C]; state: [n, C, K], contiguous, the last K tokens, which move on; weight: [C, K]; bias: [C].
    """
    (n, channels), size = x.shape, weight.shape[1]
    out = torch.empty(n, channels, dtype=x.dtype, device=x.device)
    launch(
        _convolve, (n, triton.cdiv(channels, _CHANNELS)),
        out, x, state, weight, weight if bias is None else bias, x.stride(0), channels,
        BIAS=bias is not None, SILU=silu, SIZE=size, TAPS=triton.next_power_of_2(size), BLOCK=_CHANNELS,
    )  # fmt: skip
    return out


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *, unit: bool
) -> Tensor:
    """Return the outputs of one new token of each sequence, [n, heads, dv], of a gated delta rule (arXiv:2412.06464).

    Args:
        query, key: [n, key heads, dk], whose heads follow each other; with `unit`, each is brought to length 1.
        value: [n, heads, dv], likewise; beta: [n, heads], contiguous.
        log_decay: [n, heads] or, for each channel of a key, [n, heads, dk]; contiguous.
        state: [n, heads, dk, dv], contiguous.
    """
    (n, key_heads, dk), (_, heads, dv) = key.shape, value.shape
    keys = triton.next_power_of_2(dk)
    values = _part(keys, dv)
    out = torch.empty(n, heads, dv, dtype=value.dtype, device=value.device)
    launch(
        _delta, (n, heads, triton.cdiv(dv, values)), out, state, query, key, value, log_decay, beta,
        query.stride(0), key.stride(0), value.stride(0), dk**-0.5, heads, dk, dv,
        UNIT=unit, BY_CHANNEL=log_decay.dim() == 3, GROUP=heads // key_heads, KEYS=keys, VALUES=values,
    )  # fmt: skip
    return out


def selective_update(
    state: Tensor, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor | None
) -> Tensor:
    """Return the outputs of a new token of each sequence, [n, heads, d]; Mamba 1 (arXiv:2312.00752) or 2 (2405.21060).

    Args:
        state: [n, heads, d, size], contiguous; x: [n, heads, d], whose heads follow each other.
        step: [n, heads, d], contiguous; b, c: [n, groups, size], whose groups follow each other.
        a: [heads] or [heads, d, size]; skip: [heads] or, with the latter, [heads, d]; contiguous.
    """
    (n, heads, d, size), groups = state.shape, b.shape[1]
    numbers = triton.next_power_of_2(size)
    rows = _part(numbers, d)
    out = torch.empty(n, heads, d, dtype=x.dtype, device=x.device)
    launch(
        _mamba, (n, heads, triton.cdiv(d, rows)), out, state, x, step, a, b, c, a if skip is None else skip,
        x.stride(0), b.stride(0), c.stride(0), heads, d, size,
        SKIP=skip is not None, BY_CHANNEL=a.dim() == 3, GROUP=heads // groups, ROWS=rows, SIZE=numbers,
    )  # fmt: skip
    return out
