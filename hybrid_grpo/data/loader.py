"""Draws prompts or other items in a fixed order, which is divided among the ranks and can be resumed.

A `Mixture` is drawn from several sources: the weights alone decide how many prompts of each, and neither chance nor the
number of ranks plays a part. `TrainingPrompts` are those of GRPO, and a `StepLoader` draws what a step needs of them.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_grpo.config import BatchPlan, MixtureConfig, TrainConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.batch import Numbers, Prompt
from hybrid_grpo.distributed.ranks import rank

ItemT = TypeVar("ItemT")
Choose = Callable[[NDArray[np.int64], int, int], list[tuple[int, int]]]


class PromptLoader(Generic[ItemT]):
    """An endless stream of global batches; each rank takes its own slice of every batch.

    The stream is a sequence of epochs. Each epoch has its own permutation, or the source's order. Batches ignore the
    ends of epochs: no item is dropped, and a batch may span several epochs and contain an item twice. Neither the
    stream nor a position in it depends on the number of ranks or the batch size, so both may change when a run resumes.
    """

    def __init__(
        self, prompts: Sequence[ItemT], batch_size_global: int, rank: int, world_size: int, seed: int,
        shuffle: bool = True,
    ) -> None:  # fmt: skip
        """`batch_size_global` is the number of items over all ranks, a multiple of `world_size`."""
        assert len(prompts) > 0 and 0 <= rank < world_size
        assert batch_size_global > 0 and batch_size_global % world_size == 0
        self._prompts = prompts
        self._batch_size = batch_size_global
        self._rank, self._world_size = rank, world_size
        self._seed, self._shuffle = seed, shuffle
        self._position = 0
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def position(self) -> int:
        """Number of items drawn so far, over all ranks."""
        return self._position

    def next_batch(self) -> list[tuple[ItemT, int]]:
        """This rank's contiguous slice of the next global batch. Each item comes with its epoch."""
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
            "data: the checkpoint drew rows in another way: resume with the same settings, or begin another run.name",
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


class Mixture:
    """One stream of prompts for each source. The order within a source depends on its name, not on the others."""

    def __init__(self, sources: Sequence[MixtureConfig], prompts: Sequence[Prompt], seed: int, shuffle: bool) -> None:
        total = sum(Fraction(str(source.weight)) for source in sources)
        self._weights = [Fraction(str(source.weight)) / total for source in sources]
        self._streams: dict[str, PromptLoader[int]] = {}
        self._indices: dict[str, NDArray[np.int64]] = {}
        for source in sources:
            own = [number for number, prompt in enumerate(prompts) if prompt.source == source.name]
            self._indices[source.name] = np.array(own)
            of_source = zlib.crc32(f"{seed} {source.name}".encode())
            self._streams[source.name] = PromptLoader(own, 1, 0, 1, of_source, shuffle)

    def take(self, count: int, choose: Choose | None = None) -> list[tuple[int, int]]:
        """Return the indices and epochs of the next `count` prompts, with the sources interleaved about evenly.
        `choose` overrides the order within a source: it returns the prompts to draw, given the indices of the source's
        prompts, how many to draw, and how many were drawn before."""
        drawn = [stream.position for stream in self._streams.values()]
        shares, placed = quotas(self._weights, drawn, count), []
        for own, had, (name, stream) in zip(shares, drawn, self._streams.items(), strict=True):
            in_order = stream.draw(own, range(own))
            items = in_order if choose is None else choose(self._indices[name], own, had)
            placed += [((place + 0.5) / own, item) for place, item in enumerate(items)]
        return [item for _, item in sorted(placed, key=lambda pair: pair[0])]

    def state_dict(self) -> dict[str, Any]:
        return {name: stream.state_dict() for name, stream in self._streams.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; sources that it lacks begin at their start."""
        for name in self._streams.keys() & state.keys():
            self._streams[name].load_state_dict(state[name])


def quotas(weights: Sequence[Fraction], drawn: Sequence[int], count: int) -> list[int]:
    """Return how many of the next `count` items come from each source, whose weights are 1 in total. The number is the
    source's weight times `count`, rounded down or up. It is rounded up for the sources that are furthest below their
    share of all draws, those that were `drawn` included (largest remainder method)."""
    exact = [weight * count for weight in weights]
    numbers = [math.floor(share) for share in exact]
    total = sum(drawn) + count
    owed = [weight * total - had - own for weight, had, own in zip(weights, drawn, numbers, strict=True)]
    between = [i for i, share in enumerate(exact) if share != numbers[i]]
    for i in sorted(between, key=lambda i: (-owed[i], i))[: count - sum(numbers)]:
        numbers[i] += 1
    return numbers


class StepLoader(PromptLoader[Prompt]):
    """Draws this rank's prompts for every step. The ranks together draw the same prompts, however many they are. All
    prompts are in memory, and outcomes have no effect. Each batch is one minibatch over all ranks, so that its prompts
    do not depend on the number of ranks."""

    def __init__(self, prompts: Sequence[Prompt], config: TrainConfig, plan: BatchPlan, rank: int) -> None:
        batch_size = plan.world_size * plan.prompts_per_rank // plan.num_minibatches
        data, seed = config.data, config.run.seed
        super().__init__(prompts, batch_size, rank, plan.world_size, seed, data.shuffle)
        self._mixture = Mixture(data.mixture, prompts, seed, data.shuffle) if data.mixture else None
        self._num_generations = plan.own_generations

    def next_prompts(self, batches: int) -> list[Prompt]:
        """Return this rank's prompts of the next `batches` global batches in order, with their epochs. Collective."""
        if self._mixture is None:
            return [replace(prompt, epoch=epoch) for _ in range(batches) for prompt, epoch in self.next_batch()]
        # In one draw, so that the quotas of the sources hold for the whole step.
        return self.more_prompts(batches * self._batch_size, self.wanted(batches))

    def more_prompts(self, count: int, wanted: list[int]) -> list[Prompt]:
        """Draw the next `count` prompts over all ranks, and return the ones whose indices are `wanted`. Collective."""
        return [replace(prompt, epoch=epoch) for prompt, epoch in self.draw(count, wanted)]

    def note(self, prompts: Sequence[Prompt], outcome_B: Tensor, threshold: float) -> None:
        """Record the outcomes of the groups of these prompts, [P]; each is recorded on one rank. An outcome of at least
        `threshold` (`eval.threshold`) is right, and NaN is not counted."""

    def update(self) -> None:
        """Called once per step, after the outcomes of all its groups were recorded. Collective."""

    def tried_prompts(self) -> list[dict[str, Any]]:
        """The rows of prompts.jsonl; empty if success rates are not kept."""
        return []

    def numbers(self) -> Numbers:
        """Return metrics of the run's progress through the data."""
        return {
            "data/epoch": (self.position / len(self._prompts), 1),
            "progress/completions": (self.position * self._num_generations, 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """See `PromptLoader`; also contains the positions in the sources of a mixture."""
        mixture = {} if self._mixture is None else {"mixture": self._mixture.state_dict()}
        return {**super().state_dict(), **mixture}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; see `PromptLoader`."""
        super().load_state_dict(state)
        if self._mixture is not None:
            self._mixture.load_state_dict(state.get("mixture", {}))

    def _take(self, count: int) -> list[tuple[int, int]]:
        if self._mixture is None:
            return super()._take(count)
        self._position += count
        return self._mixture.take(count)


@dataclass(frozen=True)
class TrainingPrompts:
    """The prompts to train on."""

    prompts: list[Prompt]
    """All prompts to train on; the same on every rank."""
    fact: str
    """What was read, as one line for the console and the run folder."""

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt that may be drawn."""
        return max(len(prompt.token_ids) for prompt in self.prompts)

    def loader(self, config: TrainConfig, plan: BatchPlan, device: torch.device) -> StepLoader:
        """Return a loader that draws the prompts, starting from the beginning."""
        return StepLoader(self.prompts, config, plan, rank())
