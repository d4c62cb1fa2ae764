"""Compares a run's settings with those of a checkpoint, and decides which of them may differ when the run resumes."""

import json
from typing import Any

from hybrid_grpo.config import ModelRunConfig, to_dict
from hybrid_grpo.config.composition import about
from hybrid_grpo.config.recipes import GONE
from hybrid_grpo.run.fingerprints import REWARDS

_LEARNED_BY = tuple(f"engine.deepspeed.{name}" for name in ("optimizer", "communication_data_type", "data_types"))
"""Sections of DeepSpeed's configuration that decide what is learned."""
_OF_ROLL_BACKS = ("guard.non_finite", "guard.patience", "guard.lr_factor")
"""Guard settings that affect what is learned if a run may roll back. Alarms that skip or roll back affect it too."""


def settings_of(config: ModelRunConfig) -> dict[str, Any]:
    """Return the settings by their dotted names, as a manifest holds them."""
    settings: dict[str, Any] = {}
    for section, values in to_dict(config).items():
        if section == "rewards":
            settings[section] = [
                {name: value for name, value in reward.items() if not about(f"rewards.{name}").may_change}
                for reward in values
            ]
        elif isinstance(values, list):
            settings[section] = values
        else:
            settings |= {f"{section}.{name}": value for name, value in values.items()}
    sections = settings.pop("engine.deepspeed")
    settings |= {f"engine.deepspeed.{name}": value for name, value in sections.items()}
    # As JSON returns them.
    return dict(json.loads(json.dumps(settings, default=str)))


def identity(config: ModelRunConfig, inputs: dict[str, str], rollbacks: int) -> str:
    """Return, as JSON, what decides which completions a step samples: settings and input fingerprints that must not
    change, and the number of rollbacks. The code of rewards is left out: a fix of it leaves completions valid."""
    settings = settings_of(config)
    bound = {name: value for name, value in settings.items() if not is_free(name, config, [settings])}
    inputs = {name: value for name, value in inputs.items() if not name.startswith(REWARDS)}
    return json.dumps([bound, inputs, rollbacks], sort_keys=True)


def changes(saved: dict[str, Any], config: ModelRunConfig) -> dict[str, str]:
    """Return the settings that differ from a checkpoint's, by name, as text with both values. A setting that the
    checkpoint lacks counts as having its default value."""
    kept = {name: value for name, value in saved.items() if name not in GONE or value != GONE[name]}
    before, now = {**settings_of(type(config)()), **kept}, settings_of(config)
    return {
        name: f"{name} {_short(before.get(name))} -> {_short(now.get(name))}"
        for name in {**now, **before}
        if before.get(name) != now.get(name) and name not in ("run.resume", "run.allow_changes", "run.dir", "run.name")
    }


def is_free(setting: str, config: ModelRunConfig, each: list[dict[str, Any]]) -> bool:
    """Return whether a setting of `config` may change when a run resumes; see `About`. `each` has the settings of the
    run, of now and of the checkpoint, since what alarms do in either of them binds the settings of alarms."""
    if setting.startswith("alarms.") and any(_acts(settings.get(setting)) for settings in each):
        return False
    alarms = [value for settings in each for name, value in settings.items() if name.startswith("alarms.")]
    rolls_back = any(settings.get("guard.non_finite") == "roll_back" for settings in each)
    if setting in _OF_ROLL_BACKS and (rolls_back or any(_acts(alarm, ("roll_back",)) for alarm in alarms)):
        return False
    if setting == "run.steps" and config.policy.lr_schedule != "constant":
        return False  # the schedule ends with the last step
    return bool(about(setting).may_change) and setting not in _LEARNED_BY


def _acts(alarm: Any, actions: tuple[str, ...] = ("skip", "roll_back")) -> bool:
    if not isinstance(alarm, dict):
        return False
    return alarm.get("action") in actions or any(_acts(one, actions) for one in alarm.values())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
