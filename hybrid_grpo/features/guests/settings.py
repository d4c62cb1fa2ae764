"""Settings of guests: completions by other writers that join the groups of a rollout."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import About
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Count, Name, Place

if TYPE_CHECKING:
    from hybrid_grpo.config.train import TrainConfig


@dataclass(frozen=True, config=SECTION)
class GuestConfig:
    """One guest."""

    name: Name
    """Name in the metrics and in the rollouts."""
    weight: Literal["importance", "imitation", "baseline", "distill"]
    """`importance`: the guest's completions are part of the loss, with the ratio of the policy to the guest, whose
    recorded log-probabilities serve as `old_logp`. `imitation`: the same, as if the policy had sampled them in this
    step, so that text is enough. `baseline`: they only count in the mean and standard deviation of their group.
    `distill`: the same, and a teacher in the loss learns from them (the off-policy data of GKD)."""
    path: Place | None = None
    """File of completions: rows with a prompt from the data and a `completion` or a list of `completions`. Weight
    importance also needs `token_ids` and their log-probabilities, `token_logp`, as `generate` writes them."""
    model: Place | None = None
    """Folder or hub name of a model that completes the prompts in every step, instead of a file. Every rank holds the
    whole model. It must have the policy's tokenizer."""
    per_group: Count = 1
    """Number of completions that the guest writes in each group, out of rollout.num_generations."""

    @model_validator(mode="after")
    def _check(self) -> GuestConfig:
        refuse(
            (self.path is None) == (self.model is None),
            f"guests.writers {self.name}: path and model are {'both' if self.path is not None else 'not'} set: give one"
            " of them",
        )
        return self


@dataclass(frozen=True, config=SECTION)
class GuestsConfig(FeatureConfig):
    """Guests: files or models that write some of the completions of every training group (off-policy completions)."""

    writers: list[GuestConfig] = field(default_factory=list)
    """The guests: a file, as in `[{name: seeds, path: answers.jsonl, weight: baseline}]`, or a model, as in `[{name:
    large, model: NAME, per_group: 2, weight: importance}]`. The policy writes the rest. See docs/guests.md."""

    section = "guests"
    about = About(rank=7)
    feature = "guests:Guests"
    page = "docs/guests.md"

    @property
    def is_on(self) -> bool:
        return bool(self.writers)

    @property
    def rows_per_group(self) -> int:
        return sum(guest.per_group for guest in self.writers)

    @property
    def models(self) -> dict[str, str | None]:
        return {f"guests.writers {guest.name}: model": guest.model for guest in self.writers}

    @property
    def files(self) -> dict[str, str]:
        return {f"guests.writers {guest.name}: path": guest.path for guest in self.writers if guest.path is not None}

    def check(self, config: TrainConfig) -> None:
        rollout, grpo, names = config.rollout, config.grpo, [guest.name for guest in self.writers]
        if not names:
            return
        twice = next((name for name in names if names.count(name) > 1), None)
        refuse(twice is not None, f"guests.writers: two guests are named {twice}: set another name for one of them")
        refuse(
            self.rows_per_group >= rollout.num_generations,
            f"guests.writers write {self.rows_per_group} completions of a group, and rollout.num_generations"
            f" {rollout.num_generations} leaves the policy none: set {self.rows_per_group + 2}, or lower per_group",
        )
        refuse(
            rollout.has_turns,
            f"{rollout.turns_setting} makes several turns, and guests.writers {names[0]} has one: remove one of them",
        )
        refuse(
            rollout.max_total_tokens is not None or rollout.max_turn_tokens is not None,
            f"guests.writers {names[0]} is only limited by rollout.max_completion_tokens: remove"
            " rollout.max_total_tokens and rollout.max_turn_tokens",
        )
        refuse(
            grpo.has_reference and grpo.kl_in == "reward",
            f"grpo.kl_in reward takes a KL from completions that the policy sampled, and guests.writers {names[0]}"
            " brings others: set grpo.kl_in to loss, or grpo.beta to 0",
        )
        taught = next((guest.name for guest in self.writers if guest.weight == "distill"), None)
        refuse(
            taught is not None and not any(feature.teaches == "all" for feature in config.active_features),
            f"guests.writers {taught}: weight distill needs teacher.into loss: set that, or weight to baseline",
        )
        learned = next((guest.name for guest in self.writers if guest.weight != "baseline"), None)
        refuse(
            learned is not None and grpo.drift_coef > 0,
            f"grpo.drift_coef {grpo.drift_coef} would hold the policy to guests.writers {learned}, whose completions it"
            " learns from: set its weight to baseline, or grpo.drift_coef to 0",
        )
        refuse(
            learned is not None and rollout.logprobs == "mask",
            f"rollout.logprobs mask needs the tokens that filters left, and guests.writers {learned} has none: set its"
            " weight to baseline, or rollout.logprobs to softmax",
        )
        refuse(
            learned is not None and grpo.whole_groups,
            f"grpo.whole_groups compares a group's completions, and guests.writers {learned} is learned from by itself:"
            " set its weight to baseline, or grpo.whole_groups to false",
        )
