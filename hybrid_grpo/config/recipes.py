"""Reads recipes, which are settings as nested mappings, from YAML files, and lays them over each other."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.types import Word, settled

Settings = dict[str, Any]
"""Settings as nested mappings, keyed by section and name."""

EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9_]+)[eE][-+]?[0-9]+$")
"""Numbers such as `1e-6`, which PyYAML reads as text."""

_DEEPEST, _MOST_VALUES, _MOST_LETTERS, _LONGEST_NUMBER, _MOST_DIRECTIVES = 50, 100_000, 2**20, 300, 100
"""Limits of YAML input. Beyond them it is a mistake or a trap: aliases and merges turn a few lines into terabytes."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
GONE: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "removed_settings.yaml").read_text(encoding="utf-8"))
"""Settings that earlier versions had, with their defaults, which the files of their runs hold and which are ignored."""


class GivenTwice(yaml.MarkedYAMLError):
    """A mapping contains a key twice. YAML would silently keep the last value."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that reads `1e-6` as a number."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Resolve `<<` in a mapping, keeping each key once. PyYAML 6.0.4 takes the first of two equal keys, so a
        mapping that overrides a merged value would lose its own value when it is merged in turn."""
        super().flatten_mapping(node)
        if any(not isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            return
        pairs = {(key.tag, key.value): (key, value) for key, value in node.value}
        node.value = list(pairs.values())


class _WordLoader(_Loader):
    """A loader that keeps such words, until the type of a setting says what they are (see config/types.py)."""


_WordLoader.add_constructor("tag:yaml.org,2002:bool", lambda _, node: Word(node.value))


class Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes text that would be read back as a number, such as `1e3`."""


for _reads_numbers in (_Loader, Dumper):
    _reads_numbers.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


def check_text(text: str, what: str) -> None:
    """Refuse text that cannot be written as UTF-8; `what` begins the message."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"{what} is not UTF-8: {text.encode(errors='backslashreplace').decode():.60}: type it again")


def load_yaml(text: str, of: type[_Loader] = _Loader) -> Any:
    """Parse untrusted YAML text in bounded time and memory. Raises ValueError or yaml.YAMLError if the text is not
    YAML, contains a key twice, contains itself, or is nested more deeply or larger than settings are."""
    if len(text) > _MOST_LETTERS:
        raise ValueError(f"it has more than {_MOST_LETTERS} letters: give data in a file")
    if text.count("\n%") > _MOST_DIRECTIVES:  # libyaml compares each with all others
        raise ValueError(f"it has more than {_MOST_DIRECTIVES} directives (%): remove them")
    depth = 0
    # Parsing does not recurse; composing does, in C without a limit.
    for count, event in enumerate(yaml.parse(text, _Loader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply: write settings two or three levels deep")
        if count > _MOST_VALUES:
            raise ValueError(f"it holds more than {_MOST_VALUES} values: give data in a file")
    loader = of(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _check(root: yaml.Node) -> None:
    """Refuse loops, duplicate keys and excessive size before values are made. The content of an alias (`*name`), also
    in a merge (`<<`), counts each time it is used."""
    values = letters = 0
    rest = [(root, 0)]
    while rest:
        node, depth = rest.pop()
        if depth > _DEEPEST:
            raise ValueError(f"it is nested beyond {_DEEPEST} levels, or contains itself: remove aliases (*)")
        if isinstance(node, yaml.ScalarNode):
            check_text(node.value, "a value")
            letters += len(node.value)
            if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
                raise ValueError(f"it holds a number of {len(node.value)} digits: quote it, if it is text")
            below = []
        elif isinstance(node, yaml.MappingNode):
            _refuse_twice(key for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            below = [part for pair in node.value for part in pair]
        else:
            below = node.value
        values += len(below)
        if values > _MOST_VALUES or letters > _MOST_LETTERS:
            many = f"{_MOST_VALUES} values" if values > _MOST_VALUES else f"{_MOST_LETTERS} letters"
            raise ValueError(f"it holds more than {many}: remove aliases (*), or give data in a file")
        rest += [(part, depth + 1) for part in below]


def _refuse_twice(keys: Iterable[yaml.ScalarNode]) -> None:
    seen: set[str] = set()
    for key in keys:
        if key.value in seen:
            raise GivenTwice(None, None, f"{key.value} is given twice: merge the two", key.start_mark)
        seen.add(key.value)


def read_value(text: str, hint: Any = Any) -> Any:
    """Parse text as YAML, for a setting of the type `hint`; return other text as it is. Raises GivenTwice."""
    try:
        return text if text == "" else settled(load_yaml(text, _WordLoader), hint)
    except GivenTwice:
        raise
    except (ValueError, yaml.YAMLError):  # ValueError: a date such as 2026-99-01
        return text


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> Settings:
    """Merge two recipes, setting by setting; `above` wins. A setting's list or mapping is replaced as a whole."""
    merged = dict(below)
    for section, values in above.items():
        both = isinstance(values, Mapping) and isinstance(merged.get(section), Mapping)
        merged[section] = {**merged[section], **values} if both else values
    return merged


def read_recipe(path: Path, hint: Any = Any) -> Settings:
    """Read the settings in a YAML file, for the type `hint`. Raises UserError, which names the file and the line."""
    refuse(path.is_dir(), f"--config {path} is a folder: give a YAML file")
    refuse(not path.is_file(), f"--config {path}: there is no such file")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_LETTERS + 1)  # of a larger file, as much as shows that it is too large
        settings = settled(load_yaml(text, _WordLoader), hint)
    except (OSError, ValueError, yaml.YAMLError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        where = f"line {mark.line + 1}: " if mark else ""
        raise UserError(f"--config {path} cannot be read: {where}{' '.join(problem.split())}") from None
    if not isinstance(settings, dict):
        raise UserError(f"--config {path} holds no settings: write `section:` lines")
    for name, default in GONE.items():
        section, _, key = name.partition(".")
        values = settings.get(section)
        if isinstance(values, dict) and key in values and values[key] == default:
            del values[key]
            if not values:
                del settings[section]
    return settings
