"""Describes an invalid setting in one line: its name, what is wrong, and the way out."""

import dataclasses
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from hybrid_grpo.config.commands import RecipeReader
from hybrid_grpo.config.composition import is_unused, setting_names
from hybrid_grpo.config.errors import UserError, did_you_mean
from hybrid_grpo.config.fields import LIMITS
from hybrid_grpo.config.foreign_names import foreign_answers, foreign_name, value_here
from hybrid_grpo.config.train import TrainConfig
from hybrid_grpo.config.types import bounds, example, fields_of, plain_types, type_name


def complaint(error: ValidationError, cls: Any) -> str:
    """Return a line on the first of pydantic's errors about `cls`, or on all settings that do not exist."""
    errors = error.errors(include_url=False)
    unknown = [name for each in errors for name in _unknown_names(_located(each["loc"], cls), each["input"], cls)]
    if len(unknown) > 1:
        return unknown_settings(unknown, cls)
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    place = _located(first["loc"], cls)
    if place.hint is None:
        return _unknown_place(place, first["input"], cls)
    if first["type"] == "value_error":
        return f"{place.name} {cause}"
    return _wrong_value(place, first["type"], first["input"], first.get("ctx", {}))


def unknown_settings(names: Sequence[str], cls: Any) -> str:
    """Return the message for settings that the command does not have."""
    if len(names) == 1:
        return unknown_setting(names[0], cls)
    answers, left = foreign_answers(names, setting_names(cls))
    port = ["`hybrid-grpo port FILE` writes such a recipe in the names used here"] if len(answers) > 2 else []
    others = [f"{name}: {_suggestion(name, cls)}" for name in left]
    return f"{len(names)} settings do not exist: {'; '.join([*answers, *others, *port])}"


def unknown_setting(name: str, cls: Any) -> str:
    """Return the message for a setting that the command does not have."""
    if issubclass(cls, RecipeReader) and is_unused(cls, name):
        return f"{name} is a setting of training, which {cls.command} does not use: remove it"
    return f"there is no setting {name}: {_suggestion(name, cls)}"


def _suggestion(name: str, cls: Any) -> str:
    """Suggest, in this order: our name for another framework's setting, the same name in another section, our name for
    the last part, or a similar name in this section."""
    section, _, last = name.rpartition(".")
    names = setting_names(cls)
    same = [known for known in names if known.rpartition(".")[2] == last]
    alike = get_close_matches(section, [known.rpartition(".")[0] for known in same], n=1)
    same = [f"{alike[0]}.{last}"] if alike else same
    here = f"did you mean {' or '.join(same)}?" if same else foreign_name(name, names)
    found = foreign_name(name, names, whole=True) or here
    if found is not None:
        return found
    unused = foreign_name(name, setting_names(TrainConfig))
    if unused is not None:
        return f"{unused}, which this command does not use"
    # Without the section, whose name would make any two of its settings alike.
    near = {known.rpartition(".")[2]: known for known in names if known.startswith(f"{section}.")}
    close = get_close_matches(last, near, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[close[0]]}?" if close else f"known are {', '.join(near.values())}"
    return did_you_mean(name, fields_of(cls), likeness=0.7)


@dataclasses.dataclass(frozen=True)
class _Place:
    """The location of an error in a configuration."""

    name: str
    """The name of the setting as users write it, such as `rewards[0].weight`."""
    hint: Any
    """The type of the setting; None if there is no such setting."""
    owner: Any
    """The dataclass that has the setting, or lacks it."""
    rest: Sequence[int | str]
    """The remaining parts of pydantic's path, which lie within the setting's value and are not shown to users."""


def _located(path: Sequence[int | str], cls: Any) -> _Place:
    """Find the setting at pydantic's `path`, walking down from `cls`, the class of the configuration."""
    name, hint, owner, rest = "", cls, cls, list(path)
    while rest:
        options = [plain for plain in plain_types(hint) if plain is not type(None)]
        if len(options) > 1:  # pydantic names the option that it tried
            tried = str(rest[0]).partition("[")[0]
            options = [plain for plain in options if getattr(get_origin(plain) or plain, "__name__", "") == tried]
            if not options or len(rest) == 1:
                break
            rest.pop(0)
        part = options[0]
        if dataclasses.is_dataclass(part):
            step = str(rest.pop(0))
            name, owner, hint = f"{name}.{step}".lstrip("."), part, fields_of(part).get(step)
            if hint is None:
                break
        elif get_origin(part) is list and dataclasses.is_dataclass(plain_types(get_args(part)[0])[0]):
            name, hint = f"{name}[{rest.pop(0)}]", get_args(part)[0]
        elif get_origin(part) is dict:
            entry, is_key = get_args(part)[1], rest[1:] == ["[key]"]
            of_settings = dataclasses.is_dataclass(plain_types(entry)[0]) and not is_key
            name = f"{name}{'.' if of_settings else ' '}{rest.pop(0)}"
            if is_key:
                break
            hint = entry
        else:
            break
    return _Place(name, hint, owner, rest)


def _unknown_names(place: _Place, value: Any, cls: Any) -> list[str]:
    """Return the names of the settings at a place that do not exist: of an unknown section, all."""
    if place.hint is not None or (place.owner is not cls and ("[" in place.name or place.name.count(".") > 1)):
        return []
    if isinstance(value, Mapping) and value and not foreign_name(place.name, setting_names(cls), whole=True):
        parts = ((dataclasses.replace(place, name=f"{place.name}.{key}"), part) for key, part in value.items())
        return [name for part, inner in parts for name in _unknown_names(part, inner, cls)]
    return [place.name]


def _unknown_place(place: _Place, value: Any, cls: Any) -> str:
    name, depth = place.name, place.name.count(".")
    if place.owner is cls and depth and name.partition(".")[0] in fields_of(cls):
        nested = f"{name.replace('.', ': {')}: ...{'}' * depth}"
        return f"{name}: a recipe has settings within their sections, as in {nested}"
    if place.owner is not cls and (depth > 1 or "[" in name):
        return f"there is no setting {name}: {did_you_mean(name.rpartition('.')[2], fields_of(place.owner))}"
    return unknown_settings(_unknown_names(place, value, cls), cls)


def _wrong_value(place: _Place, kind: str, value: Any, context: Mapping[str, Any]) -> str:
    name, hint = place.name, place.hint
    if kind == "missing" and not place.rest:
        return f"{name} is not set: give one"
    if kind == "string_too_short":
        in_list = bool(place.rest) and isinstance(place.rest[0], int)
        return f"{name} {'has an empty text:' if in_list else 'is empty: give a value or'} remove it"
    if kind == "less_than_equal" and context["le"] in LIMITS:
        return f"{name} {value} must be {context['le']:.16g} or less"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        words = [word for plain in plain_types(hint) if get_origin(plain) is Literal for word in get_args(plain)]
        return f"{name} {value} must be {' or '.join([bounds(hint), *words])}"
    if kind == "dataclass_type":
        of = next(plain for plain in plain_types(hint) if dataclasses.is_dataclass(plain))
        return f"{name} {value!r} must be settings, as in {example(of)}"
    lists = [plain for plain in plain_types(hint) if get_origin(plain) is list]
    if lists and len(place.rest) == 1 and isinstance(place.rest[0], int):
        name, hint = f"{name}[{place.rest[0]}]", get_args(lists[0])[0]
    expected = "a finite number" if kind == "finite_number" else type_name(hint)
    here = value_here(value, name) if isinstance(value, str | bool) else value
    meant = next(iter(" ".join(map(str, pair)) for pair in here.items()), "") if isinstance(here, dict) else here
    means = "" if meant in (value, "", []) or (lists and isinstance(here, dict)) else f": write {meant}"
    return f"{name}: expected {expected}, got {'nothing' if value == '' else value}{means}"
