"""Analyzes the types of settings, and describes them in help texts and in messages about wrong values."""

import dataclasses
import functools
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from hybrid_grpo.config.fields import LIMITS

_hints: Any = functools.cache(functools.partial(get_type_hints, include_extras=True))
"""Type hints of a class, cached: they are needed often, and Python would evaluate the annotations anew each time."""
_ALIKE = {True: ("on", "enabled", "always", "auto"), False: ("off", "disabled", "never", "none")}
"""Words of settings that mean true or false, the likeliest first."""
_WORDS = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false", Any: "text"}


def fields_of(cls: Any) -> dict[str, Any]:
    """Return the type of every field of a dataclass, by name: a section's settings, or a configuration's sections."""
    found: dict[str, Any] = _hints(cls)
    return found


def plain_types(hint: Any) -> list[Any]:
    """Return the alternatives of a type, without annotations."""
    if get_origin(hint) is Annotated:
        return plain_types(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [plain for option in get_args(hint) for plain in plain_types(option)]
    return [hint]


YAML_WORDS = {"yes": True, "no": False, "true": True, "false": False, "on": True, "off": False}
"""Words that YAML reads as true or false."""


class Word(str):
    """One of YAML_WORDS, with its letters as written."""


def settled(value: Any, hint: Any) -> Any:
    """Return what YAML holds for a setting of the type `hint`, with each word as what the setting takes: text, one of
    its own words, or true or false."""
    kinds = plain_types(hint)
    if isinstance(value, dict):
        fields = next((fields_of(kind) for kind in kinds if dataclasses.is_dataclass(kind)), {})
        entry = next((get_args(kind)[1] for kind in kinds if get_origin(kind) is dict), Any)
        return {
            str(key) if isinstance(key, Word) else key: settled(part, fields.get(key, entry))
            for key, part in value.items()
        }
    if isinstance(value, list):
        entry = next((get_args(kind)[0] for kind in kinds if get_origin(kind) in (list, tuple)), Any)
        return [settled(part, entry) for part in value]
    return _meant(value, kinds) if isinstance(value, Word) else value


def _meant(word: Word, kinds: list[Any]) -> Any:
    meaning = YAML_WORDS[word.lower()]
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if word.lower() in choices:
        return word.lower()
    if bool in kinds or Any in kinds:
        return meaning
    alike = next((choice for choice in _ALIKE[meaning] if choice in choices), None)
    return alike if alike and str not in kinds else str(word)


def takes_mapping(hint: Any) -> bool:
    """Whether a setting of this type has entries of its own, as a mapping or a section does."""
    return any(get_origin(plain) is dict or dataclasses.is_dataclass(plain) for plain in plain_types(hint))


def type_name(hint: Any) -> str:
    """Describe the values that a setting takes, such as `a whole number or null`."""
    return " or ".join(word for plain in plain_types(hint) for word in _words(plain))


def _words(plain: Any) -> list[str]:
    origin = get_origin(plain)
    if origin is Literal:
        return [str(word) for word in get_args(plain)]
    if origin is list:
        (entry,) = plain_types(get_args(plain)[0])[:1]
        return [f"a list such as [{example(entry)}]" if dataclasses.is_dataclass(entry) else "a list"]
    others: dict[Any, str] = {type(None): "null", tuple: "[number, number]", dict: "a mapping", **_WORDS}
    word = "settings" if dataclasses.is_dataclass(plain) else others.get(origin or plain)
    return [word] if word else []


def example(cls: Any) -> str:
    """Return the beginning of a dataclass's settings in YAML."""
    return f"{{{next(iter(fields_of(cls)))}: ...}}"


def bounds(hint: Any) -> str:
    """Describe the bounds of a number: `greater than 0`, `1 or greater`, `in (0, 1]`; empty if it has none."""
    low = high = None
    for mark in _marks(hint):
        low = mark if isinstance(mark, (Gt, Ge)) else low
        high = mark if isinstance(mark, (Lt, Le)) else high
    if isinstance(high, Le) and high.le in LIMITS:
        high = None
    least = low.gt if isinstance(low, Gt) else low.ge if isinstance(low, Ge) else None
    most = high.lt if isinstance(high, Lt) else high.le if isinstance(high, Le) else None
    if least is not None and most is not None:
        return f"in {'(' if isinstance(low, Gt) else '['}{least}, {most}{')' if isinstance(high, Lt) else ']'}"
    if least is not None:
        return f"greater than {least}" if isinstance(low, Gt) else f"{least} or greater"
    return ""


def _marks(hint: Any) -> list[Any]:
    own = list(hint.__metadata__) if get_origin(hint) is Annotated else []
    return own + [mark for option in get_args(hint) if get_origin(hint) is not Literal for mark in _marks(option)]
