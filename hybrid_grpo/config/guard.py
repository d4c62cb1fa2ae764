"""Settings of the alarm `non_finite`, and of rolling back to a checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import SECTION, Count, PositiveShare


@dataclass(frozen=True, config=SECTION)
class GuardConfig:
    """What happens when training diverges, and how a run goes back to a checkpoint. All ranks act alike."""

    non_finite: Literal["say", "stop", "roll_back"] = "stop"
    """What the alarm `non_finite` does if loss, gradient, ratio, entropy, KL or parity is NaN or infinite for
    `patience` consecutive steps, or in the last step: `stop` ends the run without exporting a model; `say` reports it
    once; `roll_back` goes back to a checkpoint (see lr_factor)."""
    patience: Count = 3
    """Consecutive steps with NaN or infinite values after which the alarm goes off. During these steps, updates with
    NaN or infinite gradients are skipped, and no checkpoint is written, so that no earlier one is replaced."""
    lr_factor: PositiveShare = 0.5
    """After a `roll_back`, by this alarm or another, the run continues from the newest checkpoint before the bad steps,
    with the learning rate multiplied by this."""
    max_rollbacks: Count = 3
    """Maximum number of rollbacks. The run stops instead of rolling back once more."""
