"""The states of sequences, in layers that carry one: of a fixed size, whatever the length of the sequence.

A row holds all states of one sequence. The first rows are those of the decoder's slots, by their numbers. The others
are taken by groups whose prompt has been read, until all of their sequences have a slot, and by sequences that wait for
an answer.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.model.upload import upload

_COPIED = 1 << 28
"""Bytes that are copied at a time, since a copy needs as much memory again."""


@dataclass(frozen=True)
class StateShape:
    """One state of a layer: `kind` is `conv` for the last tokens of a convolution, or `recurrent`."""

    kind: str
    layer: int
    index: int
    """Number of the state among those of its kind in the layer."""
    shape: tuple[int, ...]
    """Of one sequence."""
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def rows_for(slots: int, *, waiting: bool) -> int:
    """Return the number of rows for `slots` sequences that are decoded and the groups that are read ahead of them; if
    sequences may be `waiting` for answers, as many again."""
    return slots * (1 + waiting) + slots // 4 + 2


class StatePool:
    """`rows` rows, the first `slots` of decoded sequences. Without `shapes` it holds nothing and never runs out."""

    def __init__(self, shapes: tuple[StateShape, ...], slots: int, rows: int, device: torch.device) -> None:
        self._device, self._slots, self._rows = device, slots, rows if shapes else 0
        alike: dict[Any, list[StateShape]] = {}
        for state in shapes:
            alike.setdefault((state.shape, state.dtype), []).append(state)
        self._pools = [
            torch.zeros((len(states), self._rows, *shape), dtype=dtype, device=device)
            for (shape, dtype), states in alike.items()
        ]
        """States of one shape lie together, [states, rows, ...], so that the rows of all layers are copied at once."""
        self._states = {
            (state.kind, state.layer, state.index): own
            for pool, states in zip(self._pools, alike.values(), strict=True)
            for own, state in zip(pool, states, strict=True)
        }
        self._free = list(range(self._rows - 1, slots - 1, -1))

    def __bool__(self) -> bool:
        """Whether the model has any state."""
        return bool(self._states)

    @property
    def bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    def of(self, kind: str, layer: int, index: int) -> Tensor:
        """Return a state of all rows, [rows, ...]."""
        return self._states[kind, layer, index]

    def store(self, state: Tensor, rows: Tensor | slice | None, layer: int, index: int) -> None:
        """Store the recurrent state of some rows, unless the layer has written it in place."""
        own = self._states["recurrent", layer, index]
        if state.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            own[rows] = state

    def clear(self) -> None:
        """Free all rows. What they hold is overwritten before it is read."""
        self._free = list(range(self._rows - 1, self._slots - 1, -1))

    @property
    def has_free(self) -> bool:
        return bool(self._free) or not self._states

    def allocate(self) -> int:
        """Take a row, one of which must be free."""
        return self._free.pop() if self._states else -1

    def release(self, row: int) -> None:
        if row >= 0:
            assert row not in self._free, "a row is given back once"
            self._free.append(row)

    def copy(self, source: list[int], target: list[int]) -> None:
        """Copy rows to others, none of which is copied itself; a row may be copied to several."""
        if not source or not self._states:
            return
        from_, to = upload([source, target], self._device)
        for pool in self._pools:
            at_once = max(1, _COPIED // pool[:, 0].nbytes)
            for some, others in zip(from_.split(at_once), to.split(at_once), strict=True):
                pool.index_copy_(1, others, pool.index_select(1, some))

    def zero(self, rows: list[int]) -> None:
        """Put rows into the state before the first token."""
        if rows and self._states:
            at = upload(rows, self._device)
            for pool in self._pools:
                pool.index_fill_(1, at, 0)

    def keep(self, slot: int) -> int | None:
        """Copy a slot's row to a free one and return that; None if none is free. Without states, return -1."""
        if not self.has_free:
            return None
        row = self.allocate()
        self.copy([slot], [row])
        return row
