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


def read_value(text: str) -> Any:
    """The value that YAML reads; the text itself where it is no YAML. Raises GivenTwice."""
    try:
        return text if text == "" else yaml.load(text, _Loader)
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
        settings = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {_yaml_problem(error)}") from None
    if not isinstance(settings, dict):
        raise UserError(f"--config {path} holds no settings: write `section:` lines")
    return settings


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return where + " ".join((getattr(error, "problem", None) or str(error)).split())
