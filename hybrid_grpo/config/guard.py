"""Settings of the alarm `non_finite`, and of rolling back to a checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import SECTION, Count, PositiveShare


@dataclass(frozen=True, config=SECTION)
class GuardConfig:
    """What happens when training diverges, and how a run goes back to a checkpoint; the same on all ranks."""

    non_finite: Literal["say", "stop", "roll_back"] = "stop"
    """What the alarm `non_finite` does, when loss, gradient, ratio, entropy, KL or parity are NaN or infinite for
    `patience` steps in a row, or in the last step: `stop` ends the run without exporting a model; `say` reports it
    once; `roll_back` goes back to a checkpoint (see lr_factor)."""
    patience: Count = 3
    """Such steps in a row until the alarm goes off. Optimizer steps with such gradients are skipped. During them no
    checkpoint is written, so that none from before is replaced."""
    lr_factor: PositiveShare = 0.5
    """With `roll_back`, here or of another alarm, the run goes on from the newest checkpoint before the bad steps, at
    the learning rate times this."""
    max_rollbacks: Count = 3
    """The run stops when it would roll back more often than this."""
