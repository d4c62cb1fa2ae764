"""The prompts to train on, and the order in which the steps of a run draw them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.data.batch import Numbers, Prompt
from hybrid_grpo.data.loader import PromptLoader
from hybrid_grpo.data.mixture import Mixture
from hybrid_grpo.distributed.ranks import rank


class StepLoader(Protocol):
    """Draws this rank's prompts for every step. The ranks together draw the same prompts, however many they are."""

    def next_prompts(self, batches: int) -> list[Prompt]:
        """Return this rank's prompts of the next `batches` global batches in order, with their epochs. Collective."""

    def more_prompts(self, count: int, wanted: list[int]) -> list[Prompt]:
        """Draw the next `count` prompts over all ranks, and return the ones whose indices are `wanted`. Collective."""

    def note(self, prompts: Sequence[Prompt], outcome_B: Tensor, threshold: float) -> None:
        """Record the outcomes of the groups of these prompts, [P]; each is recorded on one rank. An outcome of at least
        `threshold` (`eval.threshold`) is right, and NaN is not counted."""

    def update(self) -> None:
        """Called once per step, after the outcomes of all its groups were recorded. Collective."""

    def numbers(self) -> Numbers:
        """Return metrics of the run's progress through the data."""

    def tried_prompts(self) -> list[dict[str, Any]]:
        """The rows of prompts.jsonl; empty if success rates are not kept."""

    def state_dict(self) -> dict[str, Any]:
        """The current position, over all ranks; the same on every rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; raises UserError if prompts were drawn in another way."""


class ListLoader(PromptLoader[Prompt]):
    """A `StepLoader` for prompts that are all in memory. Outcomes have no effect.

    Each batch is one minibatch over all ranks, so that its prompts do not depend on the number of ranks.
    """

    def __init__(self, prompts: Sequence[Prompt], config: TrainConfig, plan: BatchPlan, rank: int) -> None:
        batch_size = plan.world_size * plan.prompts_per_rank // plan.num_minibatches
        data, seed = config.data, config.run.seed
        super().__init__(prompts, batch_size, rank, plan.world_size, seed, data.shuffle)
        self._mixture = Mixture(data.mixture, prompts, seed, data.shuffle) if data.mixture else None
        self._num_generations = plan.own_generations

    def next_prompts(self, batches: int) -> list[Prompt]:
        """See `StepLoader`."""
        if self._mixture is None:
            return [replace(prompt, epoch=epoch) for _ in range(batches) for prompt, epoch in self.next_batch()]
        # In one draw, so that the quotas of the sources hold for the whole step.
        return self.more_prompts(batches * self._batch_size, self.wanted(batches))

    def more_prompts(self, count: int, wanted: list[int]) -> list[Prompt]:
        """See `StepLoader`."""
        return [replace(prompt, epoch=epoch) for prompt, epoch in self.draw(count, wanted)]

    def note(self, prompts: Sequence[Prompt], outcome_B: Tensor, threshold: float) -> None:
        """See `StepLoader`."""

    def update(self) -> None:
        """See `StepLoader`."""

    def tried_prompts(self) -> list[dict[str, Any]]:
        """See `StepLoader`."""
        return []

    def numbers(self) -> Numbers:
        """See `StepLoader`."""
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
        return ListLoader(self.prompts, config, plan, rank())
