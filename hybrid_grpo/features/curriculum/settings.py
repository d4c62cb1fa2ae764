"""Settings of the curriculum: whether and how the order of prompts follows their success rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import About
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Share

if TYPE_CHECKING:
    from hybrid_grpo.config.data import DataConfig
    from hybrid_grpo.config.train import TrainConfig
    from hybrid_grpo.features.curriculum.curriculum import RatedPrompts


@dataclass(frozen=True, config=SECTION)
class CurriculumConfig(FeatureConfig):
    """Choice of prompts by how often they are solved. A completion solves its prompt if the reward named by
    `eval.outcome` is at least `eval.threshold`."""

    sampling: Literal["uniform", "difficulty"] = "uniform"
    """`uniform` passes over all prompts, in an order that does not depend on success. `difficulty` draws prompts in
    proportion to what their groups are expected to teach: the probability that the completions are neither all right
    nor all wrong, times the share of completions that are still wrong. A prompt that has not been tried yet is expected
    to be solved as often as other prompts of similar length."""
    skip_above: Share | None = None
    """Leave out prompts with a known success rate of at least this: they are solved. A rate is known if it rests on at
    least 4 completions, discounted by age, so a prompt comes back once its completions are old."""
    skip_below: Share | None = None
    """Leave out prompts with a known success rate of at most this: they are out of reach."""

    section = "curriculum"
    about = About(rank=7)

    @property
    def is_on(self) -> bool:
        """Always True, since success rates are kept in any case."""
        return True

    @model_validator(mode="after")
    def _check(self) -> CurriculumConfig:
        low, high = self.skip_below, self.skip_above
        refuse(
            low is not None and high is not None and low >= high,
            f"curriculum.skip_below {low} and curriculum.skip_above {high} leave out everything: set the first lower",
        )
        return self

    @property
    def follows(self) -> bool:
        """Whether success rates change which prompts are drawn."""
        return self.sampling == "difficulty" or self.skip_below is not None or self.skip_above is not None

    def check(self, config: TrainConfig) -> None:
        """Raise UserError if prompts are to be chosen by success rate, but the order is fixed."""
        refuse(
            self.follows and not config.data.shuffle,
            "data.shuffle false keeps the order of the source, which curriculum changes: remove one of them",
        )

    def training_prompts(self, data: DataConfig, sampler: Any, seed: int, check: Any) -> RatedPrompts:
        """Return the training prompts, which a `Curriculum` draws."""
        from hybrid_grpo.data.prompts import read_prompts
        from hybrid_grpo.features.curriculum.curriculum import RatedPrompts

        return RatedPrompts(*read_prompts(data, sampler.tokenizer, album=sampler.album))
