"""Lists the sections of a command's configuration, and the settings in each section that the command uses."""

import dataclasses
import functools
from typing import Any, Protocol

from hybrid_grpo.config.commands import RecipeReader, RewardStageConfig, SftConfig
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
    used = cls.used.get(section) if issubclass(cls, RecipeReader) else None
    return {name: of for name, of in fields_of(hint).items() if used is None or name in used}


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
    found = (
        cls
        for cls in (TrainConfig, SftConfig, RewardStageConfig)
        if name in fields_of(cls) or name in setting_names(cls)
    )
    return next(found, None)


def is_unused(cls: Any, name: str) -> bool:
    """Whether training has this section or setting, but the command does not use it."""
    return name not in fields_of(cls) and name not in setting_names(cls) and training_with(name) is not None
