"""Builds configurations from nested mappings, and turns them back into mappings or YAML."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from hybrid_grpo.config.adapters import continued, is_adapter
from hybrid_grpo.config.commands import RecipeReader
from hybrid_grpo.config.complaints import complaint, unknown_setting
from hybrid_grpo.config.composition import is_unused, setting_names, training_with
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.evaluation import EvalSetConfig
from hybrid_grpo.config.presets import explain, with_preset
from hybrid_grpo.config.recipes import Dumper, Settings
from hybrid_grpo.config.rewards import RewardConfig
from hybrid_grpo.config.secrets import masked
from hybrid_grpo.config.types import fields_of

ConfigT = TypeVar("ConfigT")


def build(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build a configuration from mappings, as in `{"policy": {"lr": 1e-6}, "rewards": [f]}`. Raises UserError."""
    default: Any = cls()
    rollout = values.get("rollout")
    weights = rollout.get("weights") if isinstance(rollout, Mapping) else None
    if weights == "int8" and hasattr(default, "grpo"):
        values = {**values, **_of_rounded(values)}
    settings = {
        # A section may have other defaults in one command than in another.
        name: {**vars(getattr(default, name)), **(with_preset(section) if name == "grpo" else section)}
        if isinstance(section, Mapping) and dataclasses.is_dataclass(getattr(default, name, None))
        else section
        for name, section in zip(map(str, values), values.values(), strict=True)
    }
    policy = values.get("policy")
    if hasattr(default, "lora") and isinstance(policy, Mapping) and is_adapter(model := str(policy.get("model"))):
        settings["lora"] = continued(model, values.get("lora") or {})
    lora, engine = (settings.get(name) for name in ("lora", "engine"))
    whole = weights == "unmerged" or (isinstance(lora, dict) and lora.get("load_in_4bit") is True)
    if whole and (engine or {}).get("zero_stage") is None:
        settings["engine"] = {**vars(default.engine), **(engine or {}), "zero_stage": 2}
    try:
        return _adapter(cls).validate_python(settings)  # type: ignore[arg-type]  # classes hash
    except ValidationError as error:
        raise UserError(explain(complaint(error, cls), values)) from None


def _of_rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return sections with other defaults where rollouts read rounded weights, whose probabilities are not those of the
    weights in training: the loss is corrected for that, and the alarm expects it."""
    grpo, alarms = (of if (of := values.get(name)) is not None else {} for name in ("grpo", "alarms"))
    sections: dict[str, Any] = {}
    if isinstance(grpo, Mapping) and grpo.get("old_logp") != "sampler":
        sections["grpo"] = {"sampler_correction": "truncate", **with_preset(grpo)}
    if isinstance(alarms, Mapping) and isinstance(parity := alarms.get("parity", {}), Mapping):
        sections["alarms"] = {**alarms, "parity": {"above": 0.15, **parity}}
    return sections


def used_part(cls: Any, settings: Mapping[str, Any]) -> Settings:
    """Return the settings without those that only training uses, not this command. Raises UserError if a section that
    is left out contains a setting that training does not have either."""
    used: Settings = {}
    for section, values in settings.items():
        if is_unused(cls, section):
            training = training_with(section)
            for name in (f"{section}.{key}" for key in values if isinstance(values, Mapping)):
                if name not in setting_names(training):
                    raise UserError(unknown_setting(name, training))
        elif isinstance(values, Mapping):
            used[section] = {key: value for key, value in values.items() if not is_unused(cls, f"{section}.{key}")}
        else:
            used[section] = values
    return used


def refuse_unused(cls: Any, given: Mapping[str, Any]) -> None:
    """Raise UserError if a given setting belongs to training and is not used by this command."""
    for section, values in given.items() if issubclass(cls, RecipeReader) else ():
        keys = values if isinstance(values, Mapping) and section in fields_of(cls) else ()
        for name in (section, *(f"{section}.{key}" for key in keys)):
            if is_unused(cls, name):
                raise UserError(unknown_setting(name, cls))


def to_dict(config: Any) -> dict[str, Any]:
    """Return the settings as nested mappings of plain values: secrets masked, functions and data sets by name."""
    settings: dict[str, Any] = masked(_plain(config))
    return settings


def dump(config: Any) -> str:
    """Return the settings as YAML. Reading it back gives the same configuration, except for masked secrets."""
    settings = _plain(config)
    if "rewards" in settings:
        rewards = _adapter(list[RewardConfig])
        settings["rewards"] = rewards.dump_python(config.rewards, mode="json", fallback=repr, exclude_defaults=True)
    if "sets" in settings.get("eval", {}):
        sets = _adapter(dict[str, EvalSetConfig])
        settings["eval"]["sets"] = sets.dump_python(config.eval.sets, mode="json", fallback=repr, exclude_defaults=True)
    return yaml.dump(masked(settings), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _plain(config: Any) -> dict[str, Any]:
    cls: Any = type(config)
    settings = _adapter(cls).dump_python(config, mode="json", fallback=repr)
    return used_part(cls, settings)


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)
