"""Settings of the metrics by language."""

from __future__ import annotations

from dataclasses import field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Name, Text

if TYPE_CHECKING:
    from hybrid_grpo.config.train import TrainConfig

OTHER = "other"
"""The name of all languages that are not listed, and of prompts too short to tell."""


@dataclass(frozen=True, config=SECTION)
class LanguagesConfig(FeatureConfig):
    """Metrics by the language of the prompt."""

    names: list[Name] = field(default_factory=list)
    """ISO 639-1 codes of the prompts' languages, as in [en, de, zh]; empty for no such metrics. See
    docs/languages.md."""
    column: Text | None = None
    """Column of the data with the code of each prompt's language. Default: it is detected (py3langid)."""

    section = "languages"
    feature = "languages:Languages"
    page = "docs/languages.md"
    free = frozenset({"names", "column"})

    @property
    def is_on(self) -> bool:
        return bool(self.names)

    def check(self, config: TrainConfig) -> None:
        """Raise UserError if languages are named twice, or cannot be detected."""
        if not self.is_on:
            self.refuse_idle("without languages.names: set that")
            return
        twice = next((name for name in self.names if self.names.count(name) > 1 or name == OTHER), None)
        refuse(twice is not None, f"languages.names: {twice} is named twice, or is every other language: take it out")

    def check_place(self, config: TrainConfig, world_size: int) -> None:
        """Raise UserError if the package that tells languages is missing."""
        refuse(
            find_spec("py3langid") is None,
            "languages.names needs py3langid, which tells languages: pip install py3langid, or take it out",
        )
