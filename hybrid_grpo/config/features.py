"""The settings of features: the base class of their sections, and the list of features that this package has.

A feature is a folder of `hybrid_grpo/features/`. Its settings are read, checked and explained like those of the core:
it has a section in `TrainConfig`. What it does in a run is a `Feature` (run/feature.py), which its section names and
`load` imports once a run starts: settings are read, checked and explained without torch, and a resumed run compares
them, while the work of a feature holds models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import Function

if TYPE_CHECKING:
    from hybrid_grpo.config.data import DataConfig
    from hybrid_grpo.config.train import TrainConfig

REGISTERED: tuple[str, ...] = ("teacher:TeacherConfig", "guests:GuestsConfig", "curriculum:CurriculumConfig")
"""Folder and settings class of each feature, in the order in which features are called."""
FeatureList = Annotated[
    list[Function],
    BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given or []),
    Field(description="Features of your own, as `mine.py:Feature`: subclasses of hybrid_grpo.run.feature.Feature."),
]
ClassT = TypeVar("ClassT", bound=type)


class FeatureConfig:
    """Base class for the section of a feature. Subclasses are pydantic dataclasses in the feature's `settings.py`.

    Every attribute and method except `is_on` has a default that changes nothing. Attributes without annotations are
    facts about the feature, not settings.
    """

    section = ""
    """Name of the section in a recipe, and of the feature's folder."""
    feature = ""
    """The `run.feature.Feature`, as `module:Class` in its folder; empty if the feature takes no part in steps."""
    page = ""
    """Path of the feature's page in the documentation."""

    @property
    def is_on(self) -> bool:
        """Whether the feature takes part in the run."""
        raise NotImplementedError

    def refuse_idle(self, why: str, *names: str) -> None:
        """Raise UserError if a setting was changed that has no effect: one of `names`, or any setting if no names are
        given. `why` says why it has none, and the way out."""
        for name, value in vars(self).items():
            shown = str(value).lower() if isinstance(value, bool) else f"{value!s:.60}"
            refuse(
                value != getattr(type(self)(), name) and (not names or name in names),
                f"{self.section}.{name} {shown} has no effect {why}, or remove {self.section}.{name}",
            )

    @property
    def models(self) -> dict[str, str | None]:
        """The names of the models that the feature loads, keyed by the setting that names each."""
        return {}

    @property
    def files(self) -> dict[str, str]:
        """The data files that the feature reads, keyed by the setting that names each."""
        return {}

    @property
    def teaches(self) -> Literal["nothing", "sampled", "all"]:
        """From which completions the policy learns even if all rewards are equal, or groups have one completion: from
        those that it sampled, or also from those that other features supply."""
        return "nothing"

    @property
    def rows_per_group(self) -> int:
        """Completions of each group that the feature supplies and the policy therefore does not sample."""
        return 0

    def check(self, config: TrainConfig) -> None:
        """Raise UserError if the section contradicts other settings. Called whether or not the feature is on."""

    def check_place(self, config: TrainConfig, world_size: int) -> None:
        """Raise UserError if the feature is on but cannot work on this machine or with this number of ranks."""

    def training_prompts(self, data: DataConfig, sampler: Any, seed: int, check: Callable[[list[Any]], None]) -> Any:
        """Return the prompts to train on and how they are drawn (a `data.loader.TrainingPrompts`), which
        replace the core's; None if the feature does not change them. Called only if the feature is on. `sampler` has
        the tokenizer, and the album that takes pictures (`run.sampling.SamplingContext`); `check` raises
        UserError for prompts that the model cannot read. Collective."""
        return None

    def load(self) -> Any:
        """Return the class that implements the feature; None if there is none (see `feature`). Imports torch."""
        module, _, name = self.feature.partition(":")
        return getattr(import_module(f"{type(self).__module__.rpartition('.')[0]}.{module}"), name) if module else None


@functools.cache
def registered() -> dict[str, type[FeatureConfig]]:
    """Return the settings class of every registered feature, keyed by its folder, which is named like its section."""
    entries = [entry.split(":") for entry in REGISTERED]
    return {folder: getattr(import_module(f"hybrid_grpo.features.{folder}.settings"), cls) for folder, cls in entries}


def feature_folders() -> list[Path]:
    return [Path(__file__).parent.parent / "features" / folder for folder in registered()]


def with_feature_sections(cls: ClassT) -> ClassT:
    """Class decorator, applied before `dataclass`: adds a field for the section of every feature."""
    for name, settings in registered().items():
        cls.__annotations__[name] = settings
        setattr(cls, name, field(default_factory=settings))
    return cls
