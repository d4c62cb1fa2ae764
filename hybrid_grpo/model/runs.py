"""The sequences of a packed row, as layers that carry a state see them: convolutions and recurrences over each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_grpo.model.upload import Selection

Scan = Callable[[tuple[Tensor, ...], Tensor | None], tuple[Tensor, Tensor]]
"""Runs a recurrence over sequences, [n, L, ...] each, from their initial states (None: zeros); returns the outputs
[n, L, ...] and the final states. Tokens in which all inputs are 0 change no state."""
WIDE = 64
"""Sequences whose lengths differ by less than this are run together; the recurrences go in chunks as long."""


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
        parent: for each sequence, the number of the earlier one that it continues; -1 for none.
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
        """Select, for each token, the one `back` tokens earlier in its sequence or in those that this continues, or
        among the `before` tokens that came before it; else the row of zeros at the end."""
        if (back, before) in self._back:
            return self._back[back, before]
        total = sum(length for _, length in self.own)
        zero = total + before * len(self.own)
        index = np.arange(total) - back
        for number, ((start, length), parent) in enumerate(zip(self.own, self.parent, strict=True)):
            for at in range(min(back, length)):
                short = back - at  # tokens to go back beyond the sequence's start
                index[start + at] = zero
                if before:
                    index[start + at] = total + (number + 1) * before - short
                    continue
                above = parent
                while above >= 0 and short > self.own[above][1]:
                    short, above = short - self.own[above][1], self.parent[above]
                if above >= 0:
                    index[start + at] = sum(self.own[above]) - short
        self._back[back, before] = found = Selection(index, self.device)
        return found

    def last(self, x_SC: Tensor, kernel: int, before: Tensor | None) -> Tensor:
        """Return the last `kernel` tokens of each sequence, with those `before` or zeros, [sequences, kernel, C]."""
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
        of_levels: list[Tensor] = []
        for level in self._levels:
            finals: list[Tensor] = []
            for bucket in level:
                first = None if initial is None else initial[bucket.numbers]
                output, final = scan(bucket.padded(inputs), bucket.parents(of_levels[-1]) if of_levels else first)
                outputs.append(output.flatten(0, 1))
                finals.append(final)
            of_levels.append(torch.cat(finals))
        return self._places(torch.cat(outputs)), self._order_of_roots(of_levels[0])

    @cached_property
    def _levels(self) -> list[list[_Bucket]]:
        """The sequences without a parent, then those that continue them, and so on."""
        depths: list[int] = []
        for parent in self.parent:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        levels: list[list[_Bucket]] = []
        place = {-1: -1}
        for level in range(max(depths) + 1):
            by_size: dict[int, list[int]] = {}
            for number in (number for number, depth in enumerate(depths) if depth == level):
                by_size.setdefault(-(-self.own[number][1] // WIDE), []).append(number)
            groups = [members for _, members in sorted(by_size.items())]
            levels.append([_Bucket(self, members, [place[self.parent[n]] for n in members]) for members in groups])
            place = {number: at for at, number in enumerate(chain(*groups))}
        return levels

    @cached_property
    def _order_of_roots(self) -> Selection:
        return Selection(np.argsort([number for bucket in self._levels[0] for number in bucket.members]), self.device)

    @cached_property
    def _places(self) -> Selection:
        """Select the packed row's tokens from the outputs of all buckets, one after the other."""
        index = np.empty(sum(length for _, length in self.own), dtype=np.int64)
        begin = 0
        for bucket in chain(*self._levels):
            for place, number in enumerate(bucket.members):
                start, length = self.own[number]
                index[start : start + length] = begin + place * bucket.width + np.arange(length)
            begin += len(bucket.members) * bucket.width
        return Selection(index, self.device)


class _Bucket:
    """Sequences of similar length that are run together, padded to the longest."""

    def __init__(self, runs: Runs, members: list[int], parents: list[int]) -> None:
        self.members, self.width = members, max(runs.own[number][1] for number in members)
        total = sum(length for _, length in runs.own)
        index = np.full((len(members), self.width), total)
        for place, number in enumerate(members):
            start, length = runs.own[number]
            index[place, :length] = start + np.arange(length)
        self._tokens = Selection(index.flatten(), runs.device)
        self.numbers = torch.tensor(members, device=runs.device)
        self._parents = parents
        self._device = runs.device

    @cached_property
    def parents(self) -> Selection:
        """Select the final state of each member's parent among those of the level above."""
        return Selection(np.array(self._parents), self._device)

    def padded(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the bucket's tokens of packed inputs, [members, width, ...], with zeros where there are none."""
        return tuple(
            self._tokens(torch.cat([x, x.new_zeros(1, *x.shape[1:])])).unflatten(0, (len(self.members), self.width))
            for x in inputs
        )
