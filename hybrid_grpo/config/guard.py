"""Settings of the guard against runs that diverge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, Number, PositiveShare

Action = Literal["say", "stop", "roll_back"]


@dataclass(frozen=True, config=SECTION)
class LimitConfig:
    """What one number of a step may be."""

    above: Number | None = None
    """Values above this are bad."""
    below: Number | None = None
    """Values below this are bad."""
    patience: Count = 3
    """Bad steps in a row that are borne."""
    action: Action = "say"
    """What happens then: `say` so once, `stop` the run, or `roll_back` (see guard.lr_factor)."""

    @model_validator(mode="after")
    def _check(self) -> LimitConfig:
        refuse(
            self.above is None and self.below is None,
            "guard.limits: a limit has neither above nor below: give one of them, or null for no limit",
        )
        return self


Watched = Literal["kl", "ratio", "entropy", "length", "parity"]


def _defaults() -> dict[Watched, LimitConfig | None]:
    return {
        "kl": LimitConfig(above=10.0),
        "ratio": LimitConfig(above=1000.0),
        "entropy": LimitConfig(below=0.0001),
        "parity": LimitConfig(above=1.0),
    }


def _over_defaults(limits: Any) -> Any:
    """The limits that are given, setting by setting over those of the same name."""
    if not isinstance(limits, Mapping):
        return limits
    merged: dict[Any, Any] = dict(_defaults())
    for name, limit in limits.items():
        below = merged.get(name)
        merged[name] = {**(vars(below) if below else {}), **limit} if isinstance(limit, Mapping) else limit
    return merged


@dataclass(frozen=True, config=SECTION)
class GuardConfig:
    """What happens when training diverges; the same on all ranks."""

    non_finite: Action = "stop"
    """What happens when loss, gradient, ratio, entropy, KL or parity are NaN or infinite for some steps in a row, or in
    the last step: `stop` ends the run without exporting a model; `say` says so once; `roll_back` (see lr_factor)."""
    patience: Count = 3
    """Such steps in a row that are borne. Optimizer steps with such gradients are skipped. During them no checkpoint is
    written, so that they replace none from before."""
    limits: Annotated[dict[Watched, LimitConfig | None], BeforeValidator(_over_defaults)] = field(
        default_factory=_defaults
    )
    """Limits of policy/kl, policy/ratio_max, policy/entropy, completion/length_mean and parity/logp_abs_diff_mean, as
    in `{kl: {above: 10, patience: 3, action: stop}}`. Those that are given go over the defaults, which say so when KL
    is above 10, the ratio above 1000, entropy below 0.0001 or parity above 1; null takes one out."""
    lr_factor: PositiveShare = 0.5
    """With `roll_back` the run goes on from the newest checkpoint before the bad steps, at the learning rate times
    this."""
    max_rollbacks: Count = 3
    """After so many the run stops."""
