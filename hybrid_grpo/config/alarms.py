"""Settings of the alarms: what each one tolerates, and what happens when it goes off."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal, Self

from pydantic import ValidationInfo, field_validator, model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import About
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, Number, PositiveShare

SKIPPABLE = ("length_runaway", "truncated", "dead_groups", "constant_reward", "failing_rewards")
"""Alarms whose metrics are known before the policy learns from a step, so that they can have the action `skip`."""


@dataclass(frozen=True, config=SECTION)
class AlarmConfig:
    """Bounds for the metric that an alarm watches, and what happens when it is out of bounds for too long."""

    above: Number | None = None
    """Values above this are bad."""
    below: Number | None = None
    """Values below this are bad."""
    patience: Count = 3
    """Consecutive bad steps (for held-out sets: evaluations) after which the alarm goes off."""
    action: Literal["say", "skip", "stop", "roll_back"] = "say"
    """What happens when the alarm goes off, in addition to a report. `skip`: the policy does not learn from bad steps,
    until there is a good one. `stop`: the run is saved and ends with status 2. `roll_back`: the run continues from the
    newest checkpoint before the first bad step, with the learning rate multiplied by guard.lr_factor, at most
    guard.max_rollbacks times; no checkpoint is written while steps are bad."""

    def __str__(self) -> str:
        bounds = {name: bound for name in ("above", "below") if (bound := getattr(self, name)) is not None}
        shown = {**bounds, "patience": self.patience, "action": self.action}
        return f"{{{', '.join(f'{name}: {value}' for name, value in shown.items())}}}"


def _alarm(**settings: Any) -> Any:
    return field(default_factory=lambda: AlarmConfig(**settings))


@dataclass(frozen=True, config=SECTION)
class AlarmsConfig:
    """The alarms of a run, one for each symptom of trouble. Settings given for an alarm override its defaults, as in
    `kl: {above: 5, action: stop}`; null turns the alarm off. All ranks take the same action."""

    about = About(unused_by="plan", may_change=True)
    entropy_collapse: AlarmConfig | None = _alarm(below=0.02, patience=10)
    """policy/entropy in nats, in steps in which fewer than half of the groups have only right completions: the policy
    has stopped exploring before it solved the task."""
    length_runaway: AlarmConfig | None = _alarm(above=3.0, patience=5)
    """completion/length_mean, divided by its median over the 40 steps that ended 20 steps ago (early: the first 5)."""
    truncated: AlarmConfig | None = _alarm(above=0.3, patience=5)
    """completion/clipped_frac, minus its mean over the first 10 steps of the run."""
    dead_groups: AlarmConfig | None = _alarm(above=0.8, patience=10)
    """Share of groups that teach nothing although they have wrong completions: group/zero_std_frac minus
    group/all_right_frac. The alarm is off if a feature teaches without rewards."""
    constant_reward: AlarmConfig | None = _alarm(below=1e-6, patience=10)
    """reward/max minus reward/min. A task that has been learned does not set off the alarm: every completion is right
    now, but was not in the first steps. The alarm is off if a feature teaches without rewards."""
    reward_hacking: AlarmConfig | None = _alarm(above=0.1, patience=3)
    """How far the reward that tells right from wrong (eval.outcome) is below its best value in training, both averaged
    over 10 steps, while reward/mean has risen: the other functions reward wrong completions. A fall of up to 4 standard
    errors may be chance and is not counted."""
    held_out: AlarmConfig | None = _alarm(above=0.05, patience=1)
    """How far held-out accuracy is below its best while reward/mean has risen, for each held-out set. A fall of up to 2
    standard errors may be chance and is not counted, but there is a warning, `held_out_flat`, if accuracy is not above
    that of the first evaluation in two evaluations, although reward/mean has clearly risen."""
    kl: AlarmConfig | None = _alarm(above=2.0, patience=5)
    """policy/kl in nats."""
    ratio: AlarmConfig | None = _alarm(above=20.0, patience=3)
    """policy/ratio_max."""
    parity: AlarmConfig | None = _alarm(above=0.05, patience=1)
    """parity/logp_abs_diff_mean in nats: how far the sampler and the training forward pass disagree."""
    duplicates: AlarmConfig | None = _alarm(above=0.5, patience=5)
    """completion/duplicate_frac, in steps whose completions have more than 5 nats of entropy (policy/entropy times
    completion/length_mean). Equal completions should then be rare; if not, the sampler does not follow the policy."""
    frozen_tensors: AlarmConfig | None = _alarm(above=0.0, patience=1)
    """policy/frozen_tensors, after 10 optimizer steps of the run or since its resumption. The console names them."""
    throughput_drop: AlarmConfig | None = _alarm(below=0.2, patience=10)
    """throughput/generated_tokens_per_s, divided by its median, as for length_runaway."""
    failing_rewards: AlarmConfig | None = _alarm(above=0.1, patience=3)
    """reward/<function>/failed_frac of the function that fails most."""
    numbers: dict[str, AlarmConfig] = field(default_factory=dict)
    """Your own limits for any metric, as in `{completion/length_mean: {above: 400}}`."""

    @field_validator("*", mode="before")
    @classmethod
    def _over_default(cls, given: Any, info: ValidationInfo) -> Any:
        default = getattr(_DEFAULTS, info.field_name or "")
        return {**vars(default), **given} if isinstance(default, AlarmConfig) and isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = {f"alarms.{name}": (name, alarm) for name, alarm in self.named.items()}
        own = {f"alarms.numbers {name}": (name, alarm) for name, alarm in self.numbers.items()}
        for setting, (name, alarm) in {**named, **own}.items():
            refuse(
                alarm.above is None and alarm.below is None,
                f"{setting} has neither above nor below: give one of them, or null to turn it off",
            )
            refuse(
                alarm.action == "skip" and name not in SKIPPABLE,
                f"{setting}: action skip is for {', '.join(SKIPPABLE)}: set it to say, stop or roll_back",
            )
        return self

    @property
    def named(self) -> dict[str, AlarmConfig]:
        """The alarms that are on, by symptom."""
        return {name: alarm for name, alarm in vars(self).items() if isinstance(alarm, AlarmConfig)}


_DEFAULTS = AlarmsConfig()


@dataclass(frozen=True, config=SECTION)
class GuardConfig:
    """What happens when training diverges, and how a run goes back to a checkpoint. All ranks act alike."""

    about = About(unused_by="plan", may_change=True)
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
