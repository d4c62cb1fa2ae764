"""Several ranks compute one packed row together (DeepSpeed Ulysses, arXiv:2309.14509).

Each of n ranks has an n-th of the row's tokens, in order, and their targets. Around attention the ranks exchange tokens
for heads: each attends over all tokens with an n-th of the heads, by the `Segments` of the whole row. Everything else
is computed token by token, on the rank that has the token.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.model.attention import Segments
from hybrid_grpo.model.ragged_attention import Options
from hybrid_grpo.model.upload import Selection, upload


class _Exchange(torch.autograd.Function):
    """Sends x[i] to rank i of the group, and puts what comes from there in its place; its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, x = group, x.contiguous()
        dist.all_to_all_single(found := torch.empty_like(x), x, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group, which is all ranks' to use: so is the sum of its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        dist.all_reduce(x := x.clone(memory_format=torch.contiguous_format), group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None


class SplitSegments:
    """The `Batch` of a forward over this rank's part of a row of `segments`, whose length n divides."""

    def __init__(self, segments: Segments, group: Any) -> None:
        self._segments, self._group, self._n, self._rank = segments, group, group.size(), group.rank()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """Compute `routed_attention` of this rank's tokens."""
        heads, of_keys, n = query.shape[1], key.shape[1], self._n
        if of_keys % n:
            key, value = (x.repeat_interleave(heads // of_keys, dim=1) for x in (key, value))
        q, k, v = (self._exchanged(x[0]) for x in (query, key, value))
        if options.sinks is not None:
            options = options._replace(sinks=options.sinks.chunk(n)[self._rank])
        return self._exchanged(self._segments.attend(q, k, v, options)[0])

    def _exchanged(self, x: Tensor) -> Tensor:
        """Return [1, heads / n, T, d] of [heads, T / n, d], or [1, T / n, heads, d] of [T, heads / n, d]."""
        parts = _Exchange.apply(x.unflatten(0, (self._n, -1)), self._group)
        return parts.transpose(0, 1).flatten(1, 2)[None]

    @property
    def runs(self) -> Any:
        raise UserError("engine.sequence_parallel: policy.model has layers with states, which pass from token to token")


class SharedTargets:
    """The targets of a row, as `LogprobModel` takes them, that follow this rank's `part` of it. All values are there on
    the rank that `owns` the row."""

    def __init__(
        self, source: np.ndarray, target_N: np.ndarray, part: slice, group: Any, device: torch.device, *, owns: bool
    ) -> None:
        own = np.flatnonzero((source >= part.start) & (source < part.stop))
        # A rank without targets computes one, whose value nobody takes, as its head is part of a collective forward.
        chosen = own if len(own) else np.array([0])
        place = np.clip(source[chosen] - part.start, 0, part.stop - part.start - 1)
        self.source, self.target_U = Selection(place, device), upload(target_N[chosen], device)
        self._own, self._total, self._group, self._owns = upload(own, device), len(source), group, owns

    def spread(self, *values_U: Tensor) -> tuple[Tensor, ...]:
        """Return the values of all N targets; if the row is another rank's, of one, which is not in its loss."""
        # As one tensor, whose gradients all ranks sum whatever each of them needs.
        values = torch.stack(values_U)[:, : len(self._own)]
        placed = values.new_zeros(len(values), self._total).index_copy(1, self._own, values)
        every: Tensor = _Sum.apply(placed, self._group)
        return tuple(every if self._owns else every[:, :1])

    def head(self, more: Any) -> Any:
        raise UserError("engine.sequence_parallel: a feature computes logits of whole rows: remove one of them")
