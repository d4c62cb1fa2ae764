"""Objectives by name: what `grpo.preset` sets (presets.yaml)."""

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybrid_grpo.config.errors import UserError, did_you_mean


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Return the presets by name, each with its `paper` and the fields that it `sets`."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return found


def with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the section `grpo` with those of its preset, if it names one; fields that are given win.
    Raises UserError if there is no such preset."""
    return {**_sets(given.get("preset")), **given}


def over(below: Mapping[str, Any], above: Mapping[str, Any], kept: Collection[str]) -> dict[str, Any]:
    """Return the fields of the section `grpo` with others laid over them. A preset in `above` wins over fields in
    `below`, except those in `kept`, and takes the place of a preset there with all that it had set. Raises UserError if
    there is no such preset."""
    if above.get("preset") is None:
        return {**below, **above}
    before, sets = _sets(below.get("preset")), _sets(above["preset"])
    rest = {name: value for name, value in below.items() if name in kept or name not in before or value != before[name]}
    return {**rest, **{name: value for name, value in sets.items() if name not in kept}, **above}


def _sets(name: Any) -> dict[str, Any]:
    if name is None:
        return {}
    if not isinstance(name, str) or name not in presets():
        raise UserError(f"grpo.preset: there is no {name}: {did_you_mean(str(name), presets())}")
    fields: dict[str, Any] = presets()[name]["sets"]
    return fields


def explain(message: str, given: Any) -> str:
    """Return a refusal, with the fields in it that a preset set."""
    fields = given.get("grpo") if isinstance(given, Mapping) else None
    name = fields.get("preset") if isinstance(fields, Mapping) else None
    if not isinstance(fields, Mapping) or not isinstance(name, str) or name not in presets():
        return message
    sets, words = _sets(name), message.replace(",", " ").replace(":", " ").split()
    named = [f"grpo.{key}" for key in sets if f"grpo.{key}" in words and fields.get(key, sets[key]) == sets[key]]
    return f"{message} (grpo.preset {name} sets {' and '.join(named)})" if named else message


def preset_fact(grpo: Any) -> str:
    """Return in one line what the preset of a `GrpoConfig` sets, and what was given in its place."""
    preset = presets()[grpo.preset]
    fields = [(name, value, getattr(grpo, name)) for name, value in preset["sets"].items()]
    kept = ", ".join(f"{name} {_shown(value)}" for name, value, used in fields if used == value)
    other = ", ".join(f"{name} {_shown(used)}, not {_shown(value)}" for name, value, used in fields if used != value)
    return f"{grpo.preset} ({preset['paper']}): {kept}" + (f"; given: {other}" if other else "")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
