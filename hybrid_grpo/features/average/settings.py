"""Settings of the moving average of the weights."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt, Lt
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Number


@dataclass(frozen=True, config=SECTION)
class AverageConfig(FeatureConfig):
    """The exponential moving average of the weights, which is often better than the final weights. It is written to
    `model_ema/`, next to `model/`."""

    decay: Annotated[Number, Gt(0), Lt(1)] | None = None
    """After each optimizer step the average becomes `decay` times itself plus (1 - `decay`) times the weights: 0.99
    averages over about 100 optimizer steps. It takes 4 bytes of host memory for each trained weight, sharded over the
    ranks at ZeRO stages 1 to 3. Default: no average is kept."""

    section = "average"
    feature = "average:Average"
    needs_rollouts = False

    @property
    def is_on(self) -> bool:
        """Whether an average is kept."""
        return self.decay is not None
