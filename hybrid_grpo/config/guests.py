"""Settings of guests: completions of other writers that join the groups of a rollout."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, Name, Text


@dataclass(frozen=True, config=SECTION)
class GuestConfig:
    """One other writer of completions."""

    name: Name
    """Name in the metrics and in the rollouts."""
    weight: Literal["importance", "baseline"]
    """`importance`: its completions take part in the loss, with the ratio of the policy to the guest, whose recorded
    log-probabilities are `old_logp`. `baseline`: they only take part in the mean and the spread of their group."""
    path: Text | None = None
    """File of completions: rows with a prompt and a completion, or `completions`, for prompts of the data. With weight
    importance also the tokens, `token_ids`, and their log-probabilities, `token_logp`, as `generate` writes them."""
    model: Text | None = None
    """Folder or hub name of a model that completes the prompts in every step, in place of a file. Every rank holds it
    whole. It must have the policy's tokenizer."""
    per_group: Count = 1
    """Completions of a group that are the guest's, of rollout.num_generations."""

    @model_validator(mode="after")
    def _check(self) -> GuestConfig:
        refuse(
            (self.path is None) == (self.model is None),
            f"rollout.guests {self.name}: path and model are {'both' if self.path is not None else 'not'} set: give one"
            " of them",
        )
        return self
