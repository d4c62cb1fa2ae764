"""The order in which prompts are drawn, shared out over ranks and resumable.

Knows positions and indices only: what an item is, and what is done with it, is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypedDict, TypeVar

import numpy as np

from hybrid_grpo.config.errors import UserError

ItemT = TypeVar("ItemT")


class LoaderState(TypedDict):
    """A position in the endless stream of items, and the stream it belongs to. The same on every rank."""

    epoch: int
    offset: int
    """Items of this epoch that were handed out, over all ranks."""
    length: int
    seed: int
    shuffle: bool


class PromptLoader(Generic[ItemT]):
    """An endless stream of global batches, of which every rank takes its own slice.

    The stream is one epoch after another, each a permutation of its own (or the source's order). It is cut into
    batches without regard to epoch ends, so no row is dropped; a batch may span two epochs, or more where there are
    fewer items than a batch, and then holds some items twice. Neither the stream nor a position in it depends on the
    number of ranks or the batch size, so a run may resume with others.
    """

    def __init__(
        self,
        prompts: Sequence[ItemT],
        batch_size_global: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        """`batch_size_global` counts items over all ranks, and divides by `world_size`."""
        assert len(prompts) > 0 and 0 <= rank < world_size
        assert batch_size_global > 0 and batch_size_global % world_size == 0
        self._prompts = prompts
        self._batch_size = batch_size_global
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._shuffle = shuffle
        self._position = 0
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def position(self) -> int:
        """Items handed out so far, over all ranks."""
        return self._position

    def next_batch(self) -> list[tuple[ItemT, int]]:
        """This rank's contiguous slice of the next global batch: `batch_size_global / world_size` items.

        Each comes with the number of its epoch, which tells two draws of one item apart.
        """
        share = self._batch_size // self._world_size
        return self.draw(self._batch_size, range(self._rank * share, (self._rank + 1) * share))

    def draw(self, count: int, wanted: Iterable[int]) -> list[tuple[ItemT, int]]:
        """Of the next `count` items of the stream those at the `wanted` places, from 0 on, with their epochs.

        The stream goes on behind all of them: every rank must draw the same count.
        """
        drawn = self._take(count)
        return [(self._prompts[drawn[place][0]], drawn[place][1]) for place in wanted]

    def state_dict(self) -> LoaderState:
        """The position after the batches handed out so far."""
        epoch, offset = divmod(self._position, len(self._prompts))
        return LoaderState(
            epoch=epoch, offset=offset, length=len(self._prompts), seed=self._seed, shuffle=self._shuffle
        )

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on from a saved position.

        Raises:
            UserError: the position is one of another stream: other rows, another seed, shuffled or not.
        """
        ours = self.state_dict()
        for setting, saved, here in (
            ("data.path", f"{state['length']} prompts", f"{ours['length']} prompts"),
            ("run.seed", state["seed"], ours["seed"]),
            ("data.shuffle", state["shuffle"], ours["shuffle"]),
        ):
            if saved != here:
                raise UserError(
                    f"{setting}: the checkpoint was made with {saved}, this run has {here}: resume with the same,"
                    " or start anew with another run.name"
                )
        self._position = state["epoch"] * state["length"] + state["offset"]

    def _take(self, count: int) -> list[tuple[int, int]]:
        """Index and epoch of the next `count` items of the stream, which goes on behind them."""
        start = self._position
        self._position += count
        return [(self._index(place), place // len(self._prompts)) for place in range(start, self._position)]

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._prompts))
        if not self._shuffle:
            return offset
        if epoch != self._epoch:
            rng = np.random.default_rng(np.random.SeedSequence([self._seed, epoch]))
            self._epoch, self._order = epoch, rng.permutation(len(self._prompts))
        return int(self._order[offset])


def rank_share(items: Sequence[ItemT], rank: int, world_size: int) -> list[ItemT]:
    """This rank's contiguous share of a list that is gone through once, as evaluation does.

    The shares follow each other, lose nothing, and differ by at most one in length; some are empty where there are
    fewer items than ranks.
    """
    return list(items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size])
