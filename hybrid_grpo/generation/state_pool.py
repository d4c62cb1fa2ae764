"""The states of sequences, in layers that carry one: of a fixed size, whatever the length of the sequence.

A row holds all states of one sequence. The first rows are those of the decoder's slots, by their numbers. The others
are taken by groups whose prompt has been read, until all of their sequences have a slot, and by sequences that wait for
an answer.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_grpo.model.upload import upload


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
    """`rows` rows, of which the first `slots` are those of decoded sequences. Without any `shapes` it holds nothing and
    never runs out."""

    def __init__(self, shapes: tuple[StateShape, ...], slots: int, rows: int, device: torch.device) -> None:
        self._device, self._slots, self._rows = device, slots, rows if shapes else 0
        self._states = {
            (state.kind, state.layer, state.index): torch.zeros(
                (self._rows, *state.shape), dtype=state.dtype, device=device
            )
            for state in shapes
        }
        self._free = list(range(self._rows - 1, slots - 1, -1))

    def __bool__(self) -> bool:
        """Whether the model has any state."""
        return bool(self._states)

    @property
    def bytes(self) -> int:
        return sum(state.nbytes for state in self._states.values())

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

    def take(self) -> int:
        """Take a row, one of which must be free."""
        return self._free.pop() if self._states else -1

    def give_back(self, row: int) -> None:
        if row >= 0:
            assert row not in self._free, "a row is given back once"
            self._free.append(row)

    def copy(self, source: list[int], target: list[int]) -> None:
        """Copy rows; a row may be copied to several."""
        if source and self._states:
            from_, to = upload([source, target], self._device)
            for state in self._states.values():
                state.index_copy_(0, to, state.index_select(0, from_))

    def zero(self, rows: list[int]) -> None:
        """Put rows into the state before the first token."""
        for row in rows:
            for state in self._states.values():
                state[row].zero_()

    def keep(self, slot: int) -> int | None:
        """Copy a slot's row to a free one and return that; None if none is free. Without states, return -1."""
        if not self.has_free:
            return None
        row = self.take()
        self.copy([slot], [row])
        return row
