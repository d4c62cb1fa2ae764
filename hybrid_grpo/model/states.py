"""Packed rows through layers that carry a state: convolutions over the last tokens, and linear recurrences.

transformers computes such a layer with a few functions of its module. For a packed row they would carry the state of
one sequence over into the next. `adopt_states` puts functions in their place that look at the forward's `batch`: in a
packed row each sequence begins without a state or with the state that its prefix ends with. So the completions of a
group share their prompt's state, and in backward the prompt's gradient is the sum over its completions. Without a
`batch` the functions do what they did.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from hybrid_grpo.model.kernels import states as kernels
from hybrid_grpo.model.selection import Selection

Scan = Callable[[tuple[Tensor, ...], Tensor | None], tuple[Tensor, Tensor]]
"""Runs a recurrence over sequences, [n, L, ...] each, from their initial states (None: zeros); returns the outputs
[n, L, ...] and the final states. Tokens in which all inputs are 0 change no state."""
_WIDE = 64
"""Sequences whose lengths differ by less than this are run together; the recurrences go in chunks as long."""


class StateBatch(Protocol):
    """A packed forward's sequences, as layers with states need them."""

    @property
    def runs(self) -> Runs: ...


class _WeightedSum(torch.autograd.Function):
    """The sum over k of x_k times weight[:, k]. It is computed in float32, as the kernels of convolutions do: added up
    in half precision, sampling and training would round differently."""

    @staticmethod
    def forward(ctx: Any, weight_CK: Tensor, *x_kSC: Tensor) -> Tensor:
        ctx.save_for_backward(weight_CK, *x_kSC)
        total = sum(x_SC.float() * weight_C.float() for x_SC, weight_C in zip(x_kSC, weight_CK.T, strict=True))
        assert isinstance(total, Tensor)
        return total.to(weight_CK.dtype)

    @staticmethod
    def backward(ctx: Any, dout_SC: Tensor) -> tuple[Tensor, ...]:
        weight_CK, *x_kSC = ctx.saved_tensors
        dout_SC = dout_SC.float()
        dweight_CK = torch.stack([(dout_SC * x_SC.float()).sum(0) for x_SC in x_kSC], dim=1)
        dx = ((dout_SC * weight_C.float()).to(weight_CK.dtype) for weight_C in weight_CK.T)
        return dweight_CK.to(weight_CK.dtype), *dx


@dataclass(eq=False)
class Runs:
    """The sequences of a packed row of tokens.

    Args:
        own: (start, length) of every sequence; together they fill the row, in order.
        parent: for each sequence, the number of the one that it continues; -1 for none. A parent has none itself.
    """

    own: Sequence[tuple[int, int]]
    parent: Sequence[int]
    device: torch.device
    _back: dict[tuple[int, int], Selection] = field(default_factory=dict, init=False)

    def convolve(self, x_SC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, before: Tensor | None = None) -> Tensor:
        """Return the causal convolution of each sequence's channels over its last K tokens, [S, C]. `before`, if given,
        has the last K tokens that came before each sequence, [sequences, K, C]."""
        kernel = weight_CK.shape[1]
        rows = [x_SC] if before is None else [x_SC, before.flatten(0, 1).to(x_SC.dtype)]
        padded = torch.cat([*rows, x_SC.new_zeros(1, x_SC.shape[1])])
        behind = kernel if before is not None else 0
        taps = (self._tokens_back(back, behind)(padded) for back in range(kernel - 1, 0, -1))
        out: Tensor = _WeightedSum.apply(weight_CK, *taps, x_SC)
        return out if bias_C is None else out + bias_C

    def _tokens_back(self, back: int, before: int) -> Selection:
        """Select, for each token, the one `back` tokens earlier in its sequence, which may be in its parent, or among
        the `before` tokens that came before it; else the row of zeros at the end."""
        if (back, before) not in self._back:
            self._back[back, before] = self._select_back(back, before)
        return self._back[back, before]

    def _select_back(self, back: int, before: int) -> Selection:
        total = sum(length for _, length in self.own)
        zero = total + before * len(self.own)
        index = np.arange(total) - back
        for number, ((start, length), parent) in enumerate(zip(self.own, self.parent, strict=True)):
            for at in range(min(back, length)):
                short = back - at  # tokens to go back beyond the sequence's start
                index[start + at] = zero
                if before:
                    index[start + at] = total + (number + 1) * before - short
                elif parent >= 0 and short <= self.own[parent][1]:
                    index[start + at] = sum(self.own[parent]) - short
        return Selection(index, self.device)

    def last(self, x_SC: Tensor, kernel: int, before: Tensor | None) -> Tensor:
        """Return the last `kernel` tokens of each sequence, [sequences, kernel, C], with those `before` it or zeros in
        front."""
        pads = x_SC.new_zeros(len(self.own), kernel, x_SC.shape[1]) if before is None else before.to(x_SC.dtype)
        parts = [
            torch.cat([pad, x_SC[start + max(0, length - kernel) : start + length]])[-kernel:]
            for (start, length), pad in zip(self.own, pads, strict=True)
        ]
        return torch.stack(parts)

    def scan(self, scan: Scan, inputs: tuple[Tensor, ...], initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run a recurrence over each sequence, from its parent's final state or from `initial`, [sequences, ...].

        Args:
            inputs: the tokens of the packed row, [S, ...] each.

        Returns the outputs, [S, ...], and the final states of the sequences without a parent, in their order.
        """
        outputs: list[Tensor] = []
        finals: list[Tensor] = []
        for bucket in self._roots:
            start = None if initial is None else initial[bucket.numbers]
            output, final = scan(bucket.padded(inputs), start)
            outputs.append(output.flatten(0, 1))
            finals.append(final)
        final = self._order_of_roots(torch.cat(finals))
        for bucket in self._children:
            output, _ = scan(bucket.padded(inputs), bucket.parents(final))
            outputs.append(output.flatten(0, 1))
        return self._places(torch.cat(outputs)), final

    @cached_property
    def _roots(self) -> list[_Bucket]:
        return _buckets(self, [number for number, parent in enumerate(self.parent) if parent < 0])

    @cached_property
    def _children(self) -> list[_Bucket]:
        return _buckets(self, [number for number, parent in enumerate(self.parent) if parent >= 0])

    @cached_property
    def _order_of_roots(self) -> Selection:
        return Selection(np.argsort([number for bucket in self._roots for number in bucket.members]), self.device)

    @cached_property
    def _places(self) -> Selection:
        """Select the packed row's tokens from the outputs of all buckets, one after the other."""
        index = np.empty(sum(length for _, length in self.own), dtype=np.int64)
        begin = 0
        for bucket in (*self._roots, *self._children):
            for place, number in enumerate(bucket.members):
                start, length = self.own[number]
                index[start : start + length] = begin + place * bucket.width + np.arange(length)
            begin += len(bucket.members) * bucket.width
        return Selection(index, self.device)


class _Bucket:
    """Sequences of similar length that are run together, padded to the longest."""

    def __init__(self, runs: Runs, members: list[int]) -> None:
        self.members, self.width = members, max(runs.own[number][1] for number in members)
        total = sum(length for _, length in runs.own)
        index = np.full((len(members), self.width), total)
        for place, number in enumerate(members):
            start, length = runs.own[number]
            index[place, :length] = start + np.arange(length)
        self._tokens = Selection(index.flatten(), runs.device)
        self.numbers = torch.tensor(members, device=runs.device)
        roots = {number: at for at, number in enumerate(n for n, parent in enumerate(runs.parent) if parent < 0)}
        self._parents = [roots[runs.parent[number]] for number in members if runs.parent[number] >= 0]
        self._runs = runs

    def padded(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the bucket's tokens of packed inputs, [members, width, ...], with zeros where there are none."""
        return tuple(
            self._tokens(torch.cat([x, x.new_zeros(1, *x.shape[1:])])).unflatten(0, (len(self.members), self.width))
            for x in inputs
        )

    def parents(self, final: Tensor) -> Tensor:
        """Return the final state of each member's parent."""
        return self._from_parents(final)

    @cached_property
    def _from_parents(self) -> Selection:
        return Selection(np.array(self._parents), self._runs.device)


def _buckets(runs: Runs, numbers: list[int]) -> list[_Bucket]:
    by_size: dict[int, list[int]] = {}
    for number in numbers:
        by_size.setdefault(-(-runs.own[number][1] // _WIDE), []).append(number)
    return [_Bucket(runs, members) for _, members in sorted(by_size.items())]


# What a module's functions are replaced by. Each takes the arguments of the function of transformers with its name, of
# which the first is the original.


def _convolution(
    original: Any,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    batch: StateBatch | None = None,
    **more: Any,
) -> Tensor:
    """`causal_conv1d_fn`: hidden_states is [1, C, S]; with tokens of a cache, they come before the new ones."""
    if batch is None:
        return original(hidden_states, weight, bias, activation=activation, **more)
    total = sum(length for _, length in batch.runs.own)
    x_SC = hidden_states[0].T.to(weight.dtype)
    before = None
    if len(x_SC) > total:
        before = x_SC[: len(x_SC) - total].unflatten(0, (len(batch.runs.own), -1))
        x_SC = x_SC[len(x_SC) - total :]
    out = batch.runs.convolve(x_SC, weight, bias, before)
    out = out if activation is None else ACT2FN[activation](out)
    return out.T[None].to(hidden_states.dtype)


def _convolution_step(original: Any, *given: Any, **more: Any) -> Tensor:
    """`causal_conv1d_update`, which writes its state in place."""
    out = None if torch.is_grad_enabled() else kernels.causal_conv1d_update(*given, **more)
    return original(*given, **more) if out is None else out


def _delta_rule(
    original: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = _WIDE,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    batch: StateBatch | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` (arXiv:2412.06464) and KDA's; all [1, S, heads, ...]."""
    more = {name: value for name, value in more.items() if name != "cu_seqlens"}
    if batch is None:
        given = {"initial_state": initial_state, "output_final_state": output_final_state, "chunk_size": chunk_size}
        return original(query, key, value, g=g, beta=beta, **given, **more)

    def scan(inputs: tuple[Tensor, ...], initial: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, decay, strength = inputs
        size = min(chunk_size, max(16, 1 << (q.shape[1] - 1).bit_length()))
        given = {"initial_state": initial, "output_final_state": True, "chunk_size": size}
        return original(q, k, v, g=decay, beta=strength, **given, **more)

    out, final = batch.runs.scan(scan, (query[0], key[0], value[0], g[0], beta[0]), initial_state)
    return out[None], final


def _delta_step(
    original: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    batch: Any = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """The delta rules for one token; all [n, 1, heads, ...]. In our own cache a state may be written in place."""
    if batch is not None:
        given = query, key, value, g, beta, initial_state
        out = kernels.recurrent_delta_rule(*given, unit=use_qk_l2norm_in_kernel)
        if out is not None:
            return out, initial_state
    more |= {"initial_state": initial_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    return original(query, key, value, g=g, beta=beta, **more)


def _mamba2_scan(
    original: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    batch: StateBatch | None = None,
    **more: Any,
) -> Any:
    """`mamba2_chunk_scan` (arXiv:2405.21060); hidden_states, B and C are [1, S, heads, ...], dt is [1, S, heads]."""
    if batch is None:
        given: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "initial_states": initial_states}
        given |= {"dt_softplus": dt_softplus, "dt_limit": dt_limit, "return_final_states": return_final_states}
        return original(hidden_states, dt, A, B, C, chunk_size, **given, **more)
    # Steps are made here, so that padding can have steps of length 0.
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)

    def scan(inputs: tuple[Tensor, ...], initial: Tensor | None) -> tuple[Tensor, Tensor]:
        x, steps, b, c = inputs
        size = min(chunk_size, max(16, 1 << (x.shape[1] - 1).bit_length()))
        given = {"D": D, "initial_states": initial, "return_final_states": True}
        return original(x, steps, A, b, c, size, **given, **more)

    out, final = batch.runs.scan(scan, (hidden_states[0], dt[0], B[0], C[0]), initial_states)
    return (out[None], final) if return_final_states else out[None]


_step_limit: ContextVar[tuple[float, float] | None] = ContextVar("step_limit", default=None)
"""The bounds of the step sizes of the layer whose forward is running."""


def _mamba2_step(
    original: Any,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    batch: Any = None,
    **more: Any,
) -> Any:
    """`mamba2_selective_state_update`. The bounds of step sizes, which transformers leaves out where it decodes, hold
    here as they do in training."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = F.softplus(dt) if dt_softplus else dt
    if (limit := _step_limit.get()) is not None:
        dt = dt.clamp(*limit)
    out = None if batch is None or more.get("z") is not None else kernels.mamba2_update(state, x, dt, A, B, C, D)
    return original(state, x, dt, A, B, C, D, **more) if out is None else out


def _within_limit(module: Any, forward: Any, *given: Any, **more: Any) -> Any:
    token = _step_limit.set(module.time_step_limit)
    try:
        return forward(*given, **more)
    finally:
        _step_limit.reset(token)


def _no_shortcut(original: Any, *given: Any, batch: StateBatch | None = None, **more: Any) -> Any:
    """`mamba2_split_conv1d_scan_combined`, which knows no packed rows; None makes a layer take the other functions."""
    return None if batch is not None else original(*given, **more)


REPLACEMENTS: dict[str, Any] = {
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_step,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "torch_recurrent_gated_delta_rule": _delta_step,
    "recurrent_kimi_delta_attention": _delta_step,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_selective_state_update": _mamba2_step,
    "mamba2_split_conv1d_scan_combined": _no_shortcut,
}
"""Functions of transformers that are replaced in the module of a model, by name."""
RECURRENCES = {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"}
"""Those of them that run a recurrence over several tokens."""
STATE_METHODS = ("update_conv_state", "update_recurrent_state")
"""Methods of a cache that layers with a state call."""


def adopt_states(model: Any) -> None:
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
        limit = getattr(layer, "time_step_limit", None)
        if limit and tuple(limit) != (0.0, float("inf")) and not isinstance(layer.forward, functools.partial):
            layer.forward = functools.partial(_within_limit, layer, layer.forward)
