"""Draws prompts or other items in a fixed order, which is divided among the ranks and can be resumed."""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from hybrid_grpo.config.errors import refuse

ItemT = TypeVar("ItemT")


class PromptLoader(Generic[ItemT]):
    """An endless stream of global batches; each rank takes its own slice of every batch.

    The stream is a sequence of epochs. Each epoch has its own permutation, or the source's order. Batches ignore the
    ends of epochs: no item is dropped, and a batch may span several epochs and contain an item twice. Neither the
    stream nor a position in it depends on the number of ranks or the batch size, so both may change when a run resumes.
    """

    def __init__(
        self,
        prompts: Sequence[ItemT],
        batch_size_global: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        section: str = "data",
    ) -> None:
        """`batch_size_global` is the number of items over all ranks, a multiple of `world_size`; `section` is the
        section of the settings that error messages name."""
        assert len(prompts) > 0 and 0 <= rank < world_size
        assert batch_size_global > 0 and batch_size_global % world_size == 0
        self._prompts = prompts
        self._batch_size = batch_size_global
        self._rank, self._world_size = rank, world_size
        self._seed, self._shuffle, self._section = seed, shuffle, section
        self._position = 0
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def position(self) -> int:
        """Number of items drawn so far, over all ranks."""
        return self._position

    def next_batch(self) -> list[tuple[ItemT, int]]:
        """This rank's contiguous slice of the next global batch: `batch_size_global / world_size` items.

        Each item comes with its epoch, which distinguishes two draws of the same item.
        """
        return self.draw(self._batch_size, self.wanted(1))

    def wanted(self, batches: int) -> list[int]:
        """Return the indices of this rank's items among the items of the next `batches` global batches."""
        share = self._batch_size // self._world_size
        starts = [batch * self._batch_size + self._rank * share for batch in range(batches)]
        return [number for start in starts for number in range(start, start + share)]

    def draw(self, count: int, wanted: Iterable[int]) -> list[tuple[ItemT, int]]:
        """Advance the stream by `count` items, the same number on every rank. Returns the items at the indices
        `wanted` among them, with their epochs."""
        drawn = self._take(count)
        return [(self._prompts[index], epoch) for index, epoch in (drawn[number] for number in wanted)]

    def state_dict(self) -> dict[str, Any]:
        """The current position over all ranks; the same on every rank."""
        length = len(self._prompts)
        epoch, offset = divmod(self._position, length)
        return {"epoch": epoch, "offset": offset, "length": length}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position. With other rows, another seed or another order, which a run must allow
        (run.allow_changes), it is the same position in the new order."""
        refuse(
            "length" not in state,
            f"{self._section}: the checkpoint was made with rows drawn in another way: resume with the same settings,"
            " or start anew with another run.name",
        )
        self._position = state["epoch"] * state["length"] + state["offset"]

    def _take(self, count: int) -> list[tuple[int, int]]:
        """Advance the stream by `count` items, and return their indices and epochs."""
        start = self._position
        self._position += count
        return [(self._index(at), at // len(self._prompts)) for at in range(start, self._position)]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._prompts))
        if not self._shuffle:
            return offset
        if epoch != self._epoch:
            rng = np.random.default_rng(np.random.SeedSequence([self._seed, epoch]))
            self._epoch, self._order = epoch, rng.permutation(len(self._prompts))
        return int(self._order[offset])


def rank_share(items: Sequence[ItemT], rank: int, world_size: int) -> list[ItemT]:
    """This rank's contiguous share of a list that is read once, as in evaluation. The lengths of the shares differ by
    at most one; if there are fewer items than ranks, some shares are empty."""
    return list(items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size])
