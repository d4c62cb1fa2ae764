"""Settings of the moving average of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Number

if TYPE_CHECKING:
    from hybrid_grpo.config.train import TrainConfig
    from hybrid_grpo.features.average.memory import AverageMemory
    from hybrid_grpo.run.feature import Feature


@dataclass(frozen=True, config=SECTION)
class AverageConfig(FeatureConfig):
    """The exponential moving average of the weights, which is often better than the last of them. It is written to
    `model_ema/` beside `model/`."""

    decay: Annotated[Number, Gt(0), Lt(1)] | None = None
    """After each optimizer step the average is `decay` times itself plus (1 - `decay`) times the weights: 0.99 averages
    over about 100 optimizer steps. It takes 4 bytes of host memory for each weight that is trained, shared among the
    ranks at ZeRO stages 1 to 3. Default: no average is kept."""

    section = "average"
    needs_rollouts = False

    @property
    def is_on(self) -> bool:
        """Whether an average is kept."""
        return self.decay is not None

    def memory(self, config: TrainConfig) -> AverageMemory:
        """Its share of the memory plan."""
        from hybrid_grpo.features.average.memory import AverageMemory

        return AverageMemory()

    def load(self) -> type[Feature]:
        """The feature itself."""
        from hybrid_grpo.features.average.average import Average

        return Average
