"""Settings of the guard against runs that diverge."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import SECTION, Count, PositiveShare


@dataclass(frozen=True, config=SECTION)
class GuardConfig:
    """What happens when training diverges, and how a run goes back; the same on all ranks."""

    non_finite: Literal["say", "stop", "roll_back"] = "stop"
    """What happens when loss, gradient, ratio, entropy, KL or parity are NaN or infinite for some steps in a row, or in
    the last step: `stop` ends the run without exporting a model; `say` says so once; `roll_back` (see lr_factor)."""
    patience: Count = 3
    """Such steps in a row that are borne. Optimizer steps with such gradients are skipped. During them no checkpoint is
    written, so that they replace none from before."""
    lr_factor: PositiveShare = 0.5
    """With `roll_back`, here or of an alarm, the run goes on from the newest checkpoint before the bad steps, at the
    learning rate times this."""
    max_rollbacks: Count = 3
    """After so many the run stops."""
