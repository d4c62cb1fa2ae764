"""Settings as nested mappings: read from YAML files, stacked upon each other."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybrid_grpo.config.errors import UserError, refuse

Settings = dict[str, Any]
"""By section and name."""

EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$")
"""Numbers such as `1e-6`, which PyYAML takes for text."""


class _Loader(yaml.SafeLoader):
    """Reads `1e-6` as a number."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


class Dumper(yaml.SafeDumper):
    """Quotes text that would be read back as a number such as `1e3`."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


def read_value(text: str) -> Any:
    """The value that YAML reads; the text itself where it is no YAML."""
    try:
        return text if text == "" else yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> Settings:
    """Both, setting by setting; those above win. A list or a mapping that is the value of a setting is replaced."""
    merged = dict(below)
    for section, values in above.items():
        both = isinstance(values, Mapping) and isinstance(merged.get(section), Mapping)
        merged[section] = {**merged[section], **values} if both else values
    return merged


def read_recipe(path: Path, sections: Collection[str] = ()) -> Settings:
    """A YAML file of settings, refused where YAML would let a mistake pass: a key given twice, an empty section.

    Args:
        sections: names that must have settings below them.

    Raises:
        UserError: one line that names the file and the line.
    """
    refuse(path.is_dir(), f"--config {path} is a folder: give a YAML file")
    refuse(not path.is_file(), f"--config {path}: there is no such file")
    try:
        text = path.read_text(encoding="utf-8")
        recipe = yaml.compose(text, yaml.SafeLoader)
        settings = yaml.load(text, _Loader)
    except (OSError, UnicodeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--config {path} cannot be read: {_yaml_problem(error)}") from None
    if not isinstance(recipe, yaml.MappingNode):
        raise UserError(f"--config {path} holds no settings: write `section:` lines")
    _refuse_doubles(recipe, path)
    for key, node in recipe.value:
        refuse(
            key.value in sections and not isinstance(node, yaml.MappingNode),
            f"--config {path} line {key.start_mark.line + 1}: {key.value} must have settings below it:"
            " give some or take it out",
        )
    return dict(settings)


def _refuse_doubles(node: Any, path: Path) -> None:
    """YAML keeps the last of two equal keys without a word."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            refuse(key.value in seen, f"--config {path} line {line}: {key.value} is given twice: merge the two")
            seen.add(key.value)
        for _, value in node.value:
            _refuse_doubles(value, path)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_doubles(value, path)


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return where + " ".join((getattr(error, "problem", None) or str(error)).split())
