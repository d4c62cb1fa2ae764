"""From the command line, with its YAML files and dotted overrides, to a configuration."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from hybrid_grpo.config.building import build, dump, plain_types, sections, takes_mapping, unknown_setting
from hybrid_grpo.config.commands import (
    GenerateConfig,
    PlanConfig,
    ScoreConfig,
    ServeRewardConfig,
    SftConfig,
    TrainConfig,
)
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.help import help_text
from hybrid_grpo.config.recipes import Settings, overlay, read_recipe, read_value
from hybrid_grpo.config.tasks import with_task

ConfigT = TypeVar("ConfigT", TrainConfig, SftConfig, GenerateConfig, PlanConfig, ScoreConfig, ServeRewardConfig)


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[ConfigT]):
    """A parsed command line: the configuration, and the same as YAML."""

    config: ConfigT
    yaml: str


def parse(cls: type[ConfigT], arguments: list[str], command: str) -> Parsed[ConfigT]:
    """Read `--config FILE` and dotted overrides into a configuration; later ones win.

    Raises:
        UserError: one line that names the setting and the nearest valid one.
        SystemExit: after `--help` or `--print_config`.
    """
    given: Settings = {}
    print_config, rest = False, list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help"):
            print(help_text(cls, command, rest[0] if rest and not rest[0].startswith("-") else None))
            sys.exit(0)
        refuse(not argument.startswith("--"), f"{argument} is no option: a setting is given as --section.name value")
        name, given_here, text = argument[2:].partition("=")
        if name == "print_config":
            print_config = True
            continue
        if name != "config":
            _setting_type(cls, name)
        if not given_here:
            refuse(not rest or rest[0].startswith("--"), f"{name}: expected one argument")
            text = rest.pop(0)
        if name == "config":
            known = [section for section in sections(cls) if section != "rewards"]
            given = overlay(given, read_recipe(Path(text), known))
        else:
            given = _with_option(cls, given, name, text)
    parsed = configure(cls, given)
    if print_config:
        print(parsed.yaml, end="")
        sys.exit(0)
    return parsed


def configure(cls: type[ConfigT], given: Settings) -> Parsed[ConfigT]:
    """The configuration of nested mappings, over the recipe of the task that they name.

    Raises:
        UserError: one line that names the setting and the nearest valid one.
    """
    config = build(cls, with_task(cls, given))
    return Parsed(config, dump(config))


def leading_argument(arguments: list[str], usage: str) -> tuple[str, list[str]]:
    """The argument in front of the options, and the options; empty where help is asked for in its place.

    Raises:
        UserError: it is missing, or another stands behind it.
    """
    first, *options = arguments or [""]
    if first in ("-h", "--help"):
        return "", arguments
    is_option = first.startswith("-") and first != "-"
    refuse(not first or is_option or (bool(options) and not options[0].startswith("-")), f"usage: {usage}")
    return first, options


def _setting_type(cls: Any, name: str) -> Any:
    """The type of a setting, of a whole section, or of an entry of a setting that is a mapping."""
    section, *path = name.split(".")
    hint = sections(cls).get(section)
    if path and dataclasses.is_dataclass(hint):
        key, *entry = path
        hint = sections(hint).get(key)
        if entry and takes_mapping(hint):
            return Any
        path = entry
    if hint is None or path:
        raise UserError(unknown_setting(name, cls))
    return hint


def _with_option(cls: Any, given: Settings, name: str, text: str) -> Settings:
    """The settings with that of an option over them; `--section.name.key` sets one entry of a mapping."""
    hint = _setting_type(cls, name)
    section, *path = name.split(".")
    value = text if path[1:] == [] and _takes_text(hint) else read_value(text)
    if not path:
        return overlay(given, {section: value})
    below: Any = given.get(section, {}).get(path[0])
    for key in reversed(path[1:]):
        value = {key: value}
    return overlay(given, {section: {path[0]: _merged(below, value) if path[1:] else value}})


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    texts = {str(key) if type(key) is int else key: value for key, value in below.items()}
    return {**texts, **{key: _merged(texts.get(key), value) for key, value in above.items()}}


def _takes_text(hint: Any) -> bool:
    """Whether `--name 1` means the text and not the number."""
    return all(
        plain in (str, Any, type(None))
        or (get_origin(plain) is Literal and all(isinstance(value, str) for value in get_args(plain)))
        or not (plain in (int, float, bool) or get_origin(plain) in (list, dict, tuple, Literal))
        for plain in plain_types(hint)
    )
