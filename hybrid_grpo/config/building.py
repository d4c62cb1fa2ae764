"""From nested mappings to a configuration and back, with mistakes told in one line."""

import dataclasses
import functools
from collections.abc import Mapping
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import TypeAdapter, ValidationError

from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.config.evaluation import EvalSetConfig
from hybrid_grpo.config.fields import LIMITS
from hybrid_grpo.config.foreign_names import foreign_name
from hybrid_grpo.config.recipes import Dumper
from hybrid_grpo.config.rewards import RewardConfig
from hybrid_grpo.config.secrets import masked

ConfigT = TypeVar("ConfigT")


def build(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """A configuration, of nested mappings: `{"policy": {"lr": 1e-6}, "rewards": [f]}`; raises UserError."""
    default = cls()
    settings = {
        # A section may have other defaults in one command than in another.
        name: {**vars(getattr(default, name)), **section}
        if isinstance(section, Mapping) and dataclasses.is_dataclass(getattr(default, name, None))
        else section
        for name, section in zip(map(str, values), values.values(), strict=True)
    }
    try:
        return _adapter(cls).validate_python(settings)  # type: ignore[arg-type]  # classes hash
    except ValidationError as error:
        raise UserError(_one_line(error, cls)) from None


def to_dict(config: Any) -> dict[str, Any]:
    """The settings as nested mappings of plain values, secrets masked; functions and data sets by their names."""
    settings: dict[str, Any] = masked(_plain(config))
    return settings


def dump(config: Any) -> str:
    """The settings as YAML, which gives the same configuration when it is read back; secrets are masked."""
    settings = _plain(config)
    if "rewards" in settings:
        rewards = _adapter(list[RewardConfig])
        settings["rewards"] = rewards.dump_python(config.rewards, mode="json", fallback=repr, exclude_defaults=True)
    if "sets" in settings.get("eval", {}):
        sets = _adapter(dict[str, EvalSetConfig])
        settings["eval"]["sets"] = sets.dump_python(config.eval.sets, mode="json", fallback=repr, exclude_defaults=True)
    return yaml.dump(masked(settings), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def _plain(config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = _adapter(type(config)).dump_python(  # type: ignore[arg-type]  # classes hash
        config, mode="json", fallback=repr
    )
    return settings


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def sections(cls: Any) -> dict[str, Any]:
    """The type of every section, `rewards` among them."""
    return get_type_hints(cls, include_extras=True)


def setting_names(cls: Any) -> list[str]:
    """Names of all settings, dotted."""
    return [
        name
        for section, hint in sections(cls).items()
        for name in ([f"{section}.{key}" for key in sections(hint)] if dataclasses.is_dataclass(hint) else [section])
    ]


def plain_types(hint: Any) -> list[Any]:
    """The types that a setting may have, of a union each."""
    if get_origin(hint) is Annotated:
        return plain_types(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [plain for option in get_args(hint) for plain in plain_types(option)]
    return [hint]


def takes_mapping(hint: Any) -> bool:
    """Whether a setting has entries of its own."""
    return any(get_origin(plain) is dict or dataclasses.is_dataclass(plain) for plain in plain_types(hint))


def type_name(hint: Any) -> str:
    """What a setting takes, in words."""
    names = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false", Any: "text"}
    kinds = {tuple: "[number, number]", list: "a list", dict: "a mapping"}
    words: list[str] = []
    for plain in plain_types(hint):
        origin = get_origin(plain)
        if origin is Literal:
            words += map(str, get_args(plain))
        elif plain is type(None):
            words.append("null")
        elif plain in names or origin in kinds:
            words.append(names.get(plain) or kinds[origin])
        elif dataclasses.is_dataclass(plain):
            words.append("settings")
    return " or ".join(words)


def bounds(hint: Any) -> str:
    """The bounds of a number: `greater than 0`, `1 or greater`, `in (0, 1]`; empty where it has none."""
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


def _one_line(error: ValidationError, cls: Any) -> str:
    first = error.errors(include_url=False)[0]
    section, *path = first["loc"] or ("",)
    name = str(section)
    hint = sections(cls).get(name)
    if section == "rewards" and path:
        name, hint = f"rewards[{path.pop(0)}]", RewardConfig
    if path and dataclasses.is_dataclass(hint):
        key = str(path.pop(0))
        name, hint = f"{name}.{key}", sections(hint).get(key)
    if path and get_origin(hint) is list and dataclasses.is_dataclass(get_args(hint)[0]):
        name, hint = f"{name}[{path.pop(0)}]", get_args(hint)[0]
        if path:
            key, known = str(path.pop(0)), sections(hint)
            name, hint = f"{name}.{key}", known.get(key)
            if hint is None:
                return f"there is no setting {name}: {did_you_mean(key, known)}"
    own = next((plain for plain in plain_types(hint) if dataclasses.is_dataclass(plain)), None)
    if path and own is not None:
        key, known = str(path.pop(0)), sections(own)
        name, hint = f"{name}.{key}", known.get(key)
        refuse(hint is None, f"there is no setting {name}: {did_you_mean(key, known)}")
    elif path and takes_mapping(hint):
        entry = get_args(next(plain for plain in plain_types(hint) if get_origin(plain) is dict))[1]
        if dataclasses.is_dataclass(entry) and path[1:] != ["[key]"]:
            name, hint = f"{name}.{path.pop(0)}", entry
            if path:
                key = str(path.pop(0))
                name, hint = f"{name}.{key}", sections(entry).get(key)
                refuse(hint is None, f"there is no setting {name}: {did_you_mean(key, sections(entry))}")
            if len(path) > 1 and key == "rewards":
                name, key = f"{name}[{path.pop(0)}]", str(path.pop(0))
                name, hint = f"{name}.{key}", sections(RewardConfig).get(key)
                refuse(hint is None, f"there is no setting {name}: {did_you_mean(key, sections(RewardConfig))}")
        else:
            name = f"{name} {path[0]}"
    kind, value = first["type"], first["input"]
    while hint is None and isinstance(value, Mapping) and value:  # a section that there is not, with its first setting
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    if kind == "value_error":
        return f"{name} {cause}"
    if kind == "unexpected_keyword_argument" or hint is None:
        return unknown_setting(name, cls)
    if kind == "missing" and not path:
        return f"{name} is not set: give one"
    if kind == "string_too_short":
        in_list = path and isinstance(path[0], int)
        return f"{name} {'has an empty text:' if in_list else 'is empty: give a value or'} take it out"
    if kind == "less_than_equal" and first["ctx"]["le"] in LIMITS:
        return f"{name} {value} must be {first['ctx']['le']:.16g} or less"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        words = [word for plain in plain_types(hint) if get_origin(plain) is Literal for word in get_args(plain)]
        return f"{name} {value} must be {' or '.join([bounds(hint), *words])}"
    if kind == "dataclass_type":
        return f"{name} {value!r} must be settings, as in {{{next(iter(sections(own or hint)))}: ...}}"
    expected = "a list such as [{function: exact_match}]" if name == "rewards" else type_name(hint)
    if kind == "finite_number":
        expected = "a finite number"
    return f"{name}: expected {expected}, got {'nothing' if value == '' else value}"


def unknown_setting(name: str, cls: Any) -> str:
    """The message for an unknown setting. Most likely is the same name in another section, of several in the one
    that is called alike, then a similar one in this section."""
    section, _, last = name.rpartition(".")
    if section.startswith("rewards["):
        return f"there is no setting {name}: {did_you_mean(last, sections(RewardConfig))}"
    names = setting_names(cls)
    foreign = foreign_name(name, names)
    if foreign is not None:
        return f"there is no setting {name}: {foreign}"
    same = [known for known in names if known.rpartition(".")[2] == last]
    alike = get_close_matches(section, [known.rpartition(".")[0] for known in same], n=1)
    same = [f"{alike[0]}.{last}"] if alike else same
    if same:
        return f"there is no setting {name}: did you mean {' or '.join(same)}?"
    near = [known for known in names if known.startswith(f"{section}.")]
    return f"there is no setting {name}: {did_you_mean(name, near or list(sections(cls)))}"
