"""Packed rows through layers that carry a state: convolutions over the last tokens, and linear recurrences.

transformers computes such a layer with a few functions of its module. For a packed row they would carry the state of
one sequence over into the next. `install_state_functions` puts functions in their place that look at the forward's
`batch`: in a packed row each sequence begins without a state or with the state that its prefix ends with. So the
completions of a group share their prompt's state, and in backward the prompt's gradient is the sum over its
completions. Without a `batch` the functions do what they did.
"""

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from hybrid_grpo.model.kernels import states as kernels
from hybrid_grpo.model.runs import WIDE, Runs


class StateBatch(Protocol):
    """A packed forward's sequences, as layers with states need them."""

    @property
    def runs(self) -> Runs: ...


_UNLIMITED = (0.0, float("inf"))
_running: ContextVar[tuple[Any, dict[str, Any]]] = ContextVar("running", default=(None, {}))
"""The mixer of the layer whose forward is running, and the forward's keywords, where functions are not given them."""


def _noted(mixer: Any, forward: Any, *args: Any, **more: Any) -> Any:
    token = _running.set((mixer, more))
    try:
        return forward(*args, **more)
    finally:
        _running.reset(token)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Return the lengths of steps. They are made before the recurrence, so that padding can have steps of length 0."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _chunk(most: int, length: int) -> int:
    """Return the size of chunks for sequences of a length: a power of 2 that short ones do not exceed by much."""
    return min(most, max(16, 1 << (length - 1).bit_length()))


# What a module's functions are replaced by. Each takes the original, the forward's `batch` if it is `_of_packed_rows`,
# and the arguments of the function of transformers with its name.


def _of_packed_rows(replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a replacement to be called with the forward's `batch`; without one, the original is called."""

    def replaced(original: Any, *args: Any, batch: StateBatch | None = None, **more: Any) -> Any:
        batch = _running.get()[1].get("batch") if batch is None else batch
        return original(*args, **more) if batch is None else replacement(original, batch, *args, **more)

    return replaced


@_of_packed_rows
def _convolution(
    original: Any, batch: StateBatch, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_fn`: hidden_states is [1, C, S]; with tokens of a cache, they come before the new ones."""
    total = sum(length for _, length in batch.runs.own)
    x_SC = hidden_states[0].T.to(weight.dtype)
    before = None
    if len(x_SC) > total:
        before = x_SC[: len(x_SC) - total].unflatten(0, (len(batch.runs.own), -1))
        x_SC = x_SC[len(x_SC) - total :]
    out = batch.runs.convolve(x_SC, weight, bias, before)
    out = out if activation is None else ACT2FN[activation](out)
    return out.T[None].to(hidden_states.dtype)


def _convolution_step(original: Any, *args: Any, **more: Any) -> Tensor:
    """`causal_conv1d_update`, which writes its state in place."""
    out = None if torch.is_grad_enabled() else kernels.causal_conv1d_update(*args, **more)
    return original(*args, **more) if out is None else out


@_of_packed_rows
def _delta_rule(
    original: Any, batch: StateBatch, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    chunk_size: int = WIDE, initial_state: Tensor | None = None, output_final_state: bool = False, **more: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`chunk_gated_delta_rule` (arXiv:2412.06464) and KDA's; all [1, S, heads, ...]."""

    def scan(inputs: tuple[Tensor, ...], initial: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, decay, strength = inputs
        size = _chunk(chunk_size, q.shape[1])
        return original(
            q, k, v, g=decay, beta=strength, initial_state=initial, output_final_state=True, chunk_size=size, **more
        )

    out, final = batch.runs.scan(scan, (query[0], key[0], value[0], g[0], beta[0]), initial_state)
    return out[None], final


def _delta_step(
    original: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False, batch: Any = None, **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The delta rules for one token; all [n, 1, heads, ...]. In our own cache a state may be written in place."""
    if batch is not None:
        out = kernels.recurrent_delta_rule(query, key, value, g, beta, initial_state, unit=use_qk_l2norm_in_kernel)
        if out is not None:
            return out, initial_state
    return original(
        query, key, value, g=g, beta=beta, initial_state=initial_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **more,
    )  # fmt: skip


@_of_packed_rows
def _mamba2_scan(
    original: Any, batch: StateBatch, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    chunk_size: int, D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = _UNLIMITED, return_final_states: bool = False,
    **more: Any,
) -> Any:  # fmt: skip
    """`mamba2_chunk_scan` (arXiv:2405.21060); hidden_states, B and C are [1, S, heads, ...], dt is [1, S, heads]."""
    dt = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)

    def scan(inputs: tuple[Tensor, ...], initial: Tensor | None) -> tuple[Tensor, Tensor]:
        x, steps, b, c = inputs
        size = _chunk(chunk_size, x.shape[1])
        return original(x, steps, A, b, c, size, D=D, initial_states=initial, return_final_states=True, **more)

    out, final = batch.runs.scan(scan, (hidden_states[0], dt[0], B[0], C[0]), initial_states)
    return (out[None], final) if return_final_states else out[None]


@_of_packed_rows
def _selective_scan(
    original: Any, batch: StateBatch, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
    return_last_state: bool = False, **more: Any,
) -> Any:  # fmt: skip
    """`mamba_selective_scan` (arXiv:2312.00752); hidden_states and dt are [1, channels, S], B and C [1, size, S]. It
    begins without a state. As the recurrence is linear, what a state adds to the outputs is computed beside it."""
    mixer, keywords = _running.get()
    cache = keywords.get("cache", keywords.get("past_key_values"))
    dt = _steps(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)

    def scan(inputs: tuple[Tensor, ...], initial: Tensor | None) -> tuple[Tensor, Tensor]:
        x, steps, b, c = inputs
        out, final = original(x.mT, steps.mT, A, b.mT, c.mT, delta_softplus=False, return_last_state=True, **more)
        out = out.mT
        if initial is not None:
            decay_nLCN = (A * steps.float().cumsum(1)[..., None]).exp()
            out = out + ((decay_nLCN * initial[:, None]) @ c.float()[..., None]).squeeze(-1).to(out.dtype)
            final = final + decay_nLCN[:, -1] * initial
        return out, final

    initial = None if cache is None else cache.get_recurrent_state(mixer.layer_idx)
    out, final = batch.runs.scan(scan, tuple(t[0].T for t in (hidden_states, dt, B, C)), initial)
    out = out.T[None]
    out = out if D is None else out + hidden_states * D[:, None]
    out = out if z is None else out * F.silu(z)
    return (out, final) if return_last_state else out


def _state_space_step(
    original: Any, state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False, z: Tensor | None = None, **more: Any,
) -> Tensor:  # fmt: skip
    """`mamba2_selective_state_update`, and `mamba_selective_state_update`, which is the same with one head and rates of
    their own for all numbers; both write their state in place. The bounds of step sizes, which transformers leaves out
    where it decodes, hold here as they do in training."""
    limit = getattr(_running.get()[0], "time_step_limit", _UNLIMITED)
    dt, out = _steps(dt, dt_bias, dt_softplus).clamp(*limit), None
    if not torch.is_grad_enabled():
        update = kernels.state_space_update if x.dim() == 3 else _one_head
        out = update(state, x, dt, A, B, C, D)
    if out is None:
        return original(state, x, dt, A, B, C, D, z=z, **more)
    out = out.view(x.shape)
    return out if z is None else (out * F.silu(z)).to(x.dtype)


def _one_head(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor | None:
    """`state_space_update` for Mamba 1, whose x and dt are [n, channels] and B and C [n, size]."""
    x, B, C = (t.contiguous()[:, None] for t in (x, B, C))
    D = None if D is None else D[None]
    return kernels.state_space_update(state[:, None], x, dt[:, None], A[None], B, C, D)


@_of_packed_rows
def _no_shortcut(*_: Any, **__: Any) -> None:
    """`mamba2_split_conv1d_scan_combined`, which knows no packed rows; None makes a layer take the other functions."""


REPLACEMENTS: dict[str, Any] = {
    "causal_conv1d_fn": _convolution, "causal_conv1d_update": _convolution_step,
    "torch_chunk_gated_delta_rule": _delta_rule, "torch_recurrent_gated_delta_rule": _delta_step,
    "recurrent_kimi_delta_attention": _delta_step, "chunk_kimi_delta_attention": _delta_rule,
    "mamba_selective_scan": _selective_scan, "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_selective_state_update": _state_space_step, "mamba_selective_state_update": _state_space_step,
    "mamba2_split_conv1d_scan_combined": _no_shortcut,
}  # fmt: skip
"""Functions of transformers that are replaced in the module of a model, by name."""
RECURRENCES = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"}
"""Those of them that run a recurrence over several tokens, and are given the forward's `batch`."""
RECURRENCE_OF_LAYER = "mamba_selective_scan"
"""The one that is not given it, but finds it if layers are."""
STATE_METHODS = ("update_conv_state", "update_recurrent_state")
"""Methods of a cache that layers with a state call."""


def install_state_functions(model: Any) -> None:
    """Make the layers of a model that carry a state look at the forward's `batch`; see the module's docstring."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules.get(name)
        for function, replacement in REPLACEMENTS.items():
            original = getattr(module, function, None)
            if original is not None and not hasattr(original, "replaces"):
                replaced = functools.partial(replacement, original)
                functools.update_wrapper(replaced, original).replaces = original  # type: ignore[attr-defined]
                setattr(module, function, replaced)
    for layer in model.modules():
        mixer = getattr(layer, "mamba", None)
        if not hasattr(sys.modules.get(type(mixer).__module__), RECURRENCE_OF_LAYER):
            mixer = layer if tuple(getattr(layer, "time_step_limit", None) or _UNLIMITED) != _UNLIMITED else None
        if mixer is not None and not isinstance(layer.forward, functools.partial):
            layer.forward = functools.partial(_noted, mixer, layer.forward)
