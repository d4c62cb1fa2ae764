"""Settings as nested mappings: read from YAML files, stacked upon each other."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hybrid_grpo.config.errors import UserError, refuse

Settings = dict[str, Any]
"""By section and name."""

EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$")
"""Numbers such as `1e-6`, which PyYAML takes for text."""

_DEEPEST, _MOST_VALUES = 50, 100_000
"""Beyond these, YAML is a mistake or a trap: aliases make terabytes of a few lines."""


class GivenTwice(yaml.MarkedYAMLError):
    """A mapping has a key twice, of which YAML would keep the last without a word."""


class _Loader(yaml.SafeLoader):
    """Reads `1e-6` as a number, and refuses a key that is given twice."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        # Before `<<` puts the keys of another mapping among the node's own.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise GivenTwice(None, None, f"{key.value} is given twice: merge the two", key.start_mark)
            seen.add(key.value)
        return node


class Dumper(yaml.SafeDumper):
    """Quotes text that would be read back as a number such as `1e3`."""


for _reads_numbers in (_Loader, Dumper):
    _reads_numbers.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


def check_text(text: str, what: str) -> None:
    """Refuse text that cannot be written as UTF-8; `what` begins the message."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"{what} is not UTF-8: {text.encode(errors='backslashreplace').decode():.60}: type it anew")


def _load(text: str) -> Any:
    """What YAML reads, if it is settings and not a riddle: without loops, and not deeper or larger than settings are.
    Raises ValueError and yaml.YAMLError."""
    try:
        value = yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply: write settings two or three levels deep") from None
    _count(value, 0, 0)
    return value


def _count(value: Any, count: int, depth: int) -> int:
    """The number of values in a value, added to `count`; aliases (`*name`) count as often as they are used."""
    count += 1
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep, or contains itself: take out the alias (*)")
    if count > _MOST_VALUES:
        raise ValueError(f"it holds more than {_MOST_VALUES} values: take out aliases (*), or give data in a file")
    if isinstance(value, str):
        check_text(value, "a value")
    elif isinstance(value, dict):
        for key, below in value.items():
            count = _count(below, _count(key, count, depth + 1), depth + 1)
    elif isinstance(value, (list, tuple, set)):
        for below in value:
            count = _count(below, count, depth + 1)
    return count


def read_value(text: str) -> Any:
    """The value that YAML reads; the text itself where it is no YAML. Raises GivenTwice."""
    try:
        return text if text == "" else _load(text)
    except GivenTwice:
        raise
    except (ValueError, yaml.YAMLError):  # ValueError: a date such as 2026-99-01
        return text


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> Settings:
    """Both, setting by setting; those above win. A list or a mapping that is the value of a setting is replaced."""
    merged = dict(below)
    for section, values in above.items():
        both = isinstance(values, Mapping) and isinstance(merged.get(section), Mapping)
        merged[section] = {**merged[section], **values} if both else values
    return merged


def read_recipe(path: Path) -> Settings:
    """The settings in a YAML file. Raises UserError, which names the file and the line, where it cannot be read."""
    refuse(path.is_dir(), f"--config {path} is a folder: give a YAML file")
    refuse(not path.is_file(), f"--config {path}: there is no such file")
    try:
        settings = _load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {_yaml_problem(error)}") from None
    if not isinstance(settings, dict):
        raise UserError(f"--config {path} holds no settings: write `section:` lines")
    return settings


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return where + " ".join((getattr(error, "problem", None) or str(error)).split())
