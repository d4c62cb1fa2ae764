"""Lists the sections of a command's configuration, and the settings in each section that the command uses."""

import dataclasses
import functools
from typing import Any, Protocol

from hybrid_grpo.config.about import About
from hybrid_grpo.config.commands import RecipeReader, SftConfig
from hybrid_grpo.config.data import DataConfig
from hybrid_grpo.config.evaluation import EvalConfig
from hybrid_grpo.config.model import PolicyConfig
from hybrid_grpo.config.rewards import RewardConfig, ScoringConfig
from hybrid_grpo.config.rollout import RolloutConfig
from hybrid_grpo.config.run import RunConfig
from hybrid_grpo.config.train import TrainConfig
from hybrid_grpo.config.types import fields_of


class SamplingConfig(Protocol):
    """The sections of every command that samples completions."""

    @property
    def run(self) -> RunConfig: ...
    @property
    def policy(self) -> PolicyConfig: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def scoring(self) -> ScoringConfig: ...


class EvaluationConfig(SamplingConfig, Protocol):
    """The sections and properties that all commands with held-out sets have."""

    @property
    def rewards(self) -> list[RewardConfig]: ...
    @property
    def eval(self) -> EvalConfig: ...
    @property
    def reward_names(self) -> list[str]: ...


def settings_of(cls: Any, section: str) -> dict[str, Any]:
    """Return the types of a section's settings that the command uses, by name; empty for a list such as `rewards`."""
    hint = fields_of(cls).get(section)
    if not dataclasses.is_dataclass(hint):
        return {}
    refuses = issubclass(cls, RecipeReader)
    return {name: of for name, of in fields_of(hint).items() if not refuses or has_effect(cls, f"{section}.{name}")}


def has_effect(cls: Any, name: str) -> bool:
    """Whether the command uses a setting of training that its sections have."""
    return getattr(cls, "command", "") not in (about(name).unused_by or "").split()


@functools.cache
def setting_names(cls: Any) -> tuple[str, ...]:
    """Dotted names of all settings that the command uses."""
    sections = {section: list(settings_of(cls, section)) for section in fields_of(cls)}
    return tuple(
        name
        for section, keys in sections.items()
        for name in ([f"{section}.{key}" for key in keys] if keys else [section])
    )


def training_with(name: str) -> Any:
    """Return the class of a training configuration that has this section or setting; None if there is none."""
    found = (cls for cls in (TrainConfig, SftConfig) if name in fields_of(cls) or name in setting_names(cls))
    return next(found, None)


@functools.lru_cache(maxsize=1 << 14)  # more than the watch page reads of several runs
def about(name: str) -> About:
    """Return what a setting, by its dotted name, or else its section says about it; nothing if training has neither."""
    section, _, key = name.partition(".")
    hint = fields_of(training)[section] if (training := training_with(section)) else None
    cls = RewardConfig if section == "rewards" else hint
    own = fields_of(cls).get(key.partition(".")[0]) if dataclasses.is_dataclass(cls) else None
    marks = (getattr(cls, "about", None), *getattr(hint, "__metadata__", ()), *getattr(own, "__metadata__", ()))
    said = (fact for mark in marks if isinstance(mark, About) for fact in vars(mark).items())
    return About(**{what: value for what, value in said if value is not None})


def is_unused(cls: Any, name: str) -> bool:
    """Whether training has this section or setting, but the command does not use it."""
    return name not in fields_of(cls) and name not in setting_names(cls) and training_with(name) is not None
