"""From YAML and dotted command-line overrides to a configuration, without importing torch."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, set_dumper, set_parsing_settings

from hybrid_grpo.config import (
    GenerateConfig,
    PlanConfig,
    RewardConfig,
    ScoreConfig,
    ServeRewardConfig,
    SftConfig,
    TrainConfig,
)
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.data.tasks import task_settings

set_parsing_settings(docstring_parse_attribute_docstrings=True)

ConfigT = TypeVar("ConfigT", TrainConfig, SftConfig, GenerateConfig, PlanConfig, ScoreConfig, ServeRewardConfig)


@dataclass(frozen=True)
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
    parser = _parser(cls, command)  # type: ignore[arg-type]  # classes hash
    try:
        parser = _with_task(parser, cls, command, arguments)
        namespace = parser.parse_args(arguments)
    except ArgumentError as error:
        raise UserError(_one_line(str(error), cls)) from None
    sections = get_type_hints(cls)
    for name, section in sections.items():
        if name != "rewards":
            _make_keys_text(section, vars(namespace[name]))
    values: dict[str, Any] = {
        name: [_build(RewardConfig, f"rewards[{i}]", entry) for i, entry in enumerate(namespace.rewards or [])]
        if name == "rewards"
        else _build(sections[name], name, vars(namespace[name]))
        for name in sections
    }
    return Parsed(cls(**values), parser.dump(namespace, skip_none=False, skip_link_targets=False))


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


def _with_task(parser: ArgumentParser, cls: type[Any], command: str, arguments: list[str]) -> ArgumentParser:
    """A parser whose defaults are those of `data.task`, where the arguments name one."""
    if "-h" in arguments or "--help" in arguments or "data" not in get_type_hints(cls):
        return parser
    # What is given is known when all has been read; only then are there defaults to read it once more over.
    given = parser.parse_args([argument for argument in arguments if not argument.startswith("--print_config")])
    data, rewards = given.get("data"), given.get("rewards")
    if data is None or data.task is None:
        return parser
    settings = task_settings(
        data.task,
        # What is scored takes the place of the task's source.
        "SOURCE" if cls is ScoreConfig else data.path,
        own_eval=data.eval_path is not None,
        own_rewards=bool(rewards),
        trains="eval" in get_type_hints(cls),
    )
    parser = _parser.__wrapped__(cls, command)
    parser.set_defaults(settings)
    return parser


@functools.cache
def _parser(cls: type[Any], command: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"hybrid-grpo {command}",
        description=cls.__doc__,
        exit_on_error=False,
        default_env=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action=_Recipe, help="YAML file with any of the settings below.")
    parser.add_class_arguments(cls, skip={"rewards"})
    if "rewards" in get_type_hints(cls):
        # As plain entries: of dataclasses, a later list would be merged into an earlier one, entry by entry; and in
        # a dict[str, Any] the text '2' would be read once more, as a number.
        parser.add_argument("--rewards", type=list[dict], default=[], help=_rewards_help())
    return parser


class _Dumper(yaml.SafeDumper):
    """Quotes text that looks like `1e3`: PyYAML takes that for text, and the reader of recipes for a number."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)
set_dumper("yaml", lambda values: yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _rewards_help() -> str:
    keys = ", ".join(f.name for f in dataclasses.fields(RewardConfig))
    return f"Reward functions: `[{{function: exact_match, weight: 1.0}}, ...]`; an entry has {keys}."


class _Recipe(ActionConfigFile):
    """A YAML file of settings, refused where YAML would let a mistake pass: a key given twice, an empty section."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        path = Path(value)
        refuse(path.is_dir(), f"--config {path} is a folder: give a YAML file")
        refuse(not path.is_file(), f"--config {path}: there is no such file")
        try:
            recipe = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
        except (OSError, UnicodeError, yaml.YAMLError) as error:
            raise UserError(f"--config {path} cannot be read: {_yaml_problem(error)}") from None
        if not isinstance(recipe, yaml.MappingNode):
            raise UserError(f"--config {path} holds no settings: write `section:` lines")
        _refuse_doubles(recipe, path)
        sections = {
            *get_type_hints(GenerateConfig),
            *get_type_hints(SftConfig),
            *get_type_hints(ServeRewardConfig),
        } - {"rewards"}
        for key, node in recipe.value:
            refuse(
                key.value in sections and not isinstance(node, yaml.MappingNode),
                f"--config {path} line {key.start_mark.line + 1}: {key.value} must have settings below it:"
                " give some or take it out",
            )
        super().__call__(parser, namespace, value, option_string)


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


def _build(cls: type[Any], path: str, values: Any) -> Any:
    """The dataclass of one section, every value of the declared type: null, nan and the like are refused."""
    refuse(not isinstance(values, dict), f"{path} {values!r} must be settings, as in {{{_first_field(cls)}: ...}}")
    hints = get_type_hints(cls)
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"there is no setting {path}.{name}: {did_you_mean(str(name), list(hints))}")
        refuse(not _fits(value, hints[name]), f"{path}.{name}: expected {_type_name(hints[name])}, got {value!r}")
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        refuse(required and f.name not in values, f"{path}.{f.name} is not set: give one")
    return cls(**{name: float(value) if hints[name] is float else value for name, value in values.items()})


def _make_keys_text(cls: type[Any], values: dict[str, Any]) -> None:
    """In place: YAML reads the key of `{5: -1.0}` as a number, and the command line that of `--name.5=-1` as text."""
    for name, hint in get_type_hints(cls).items():
        if hint == dict[str, float] and isinstance(values[name], dict):
            values[name] = {str(k) if type(k) is int else k: value for k, value in values[name].items()}


def _first_field(cls: type[Any]) -> str:
    return dataclasses.fields(cls)[0].name


def _fits(value: Any, hint: Any) -> bool:
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in options)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in options)
    if origin is tuple:
        return isinstance(value, tuple) and all(map(_fits, value, options))
    if origin is list:
        return isinstance(value, list) and all(_fits(item, options[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type_name(option) for option in get_args(hint))
    if hint == list[RewardConfig]:
        return "a list such as [{function: exact_match}]"
    names = {float: "a finite number", int: "a whole number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(hint) or {tuple: "[number, number]", list: "a list", dict: "a mapping"}[get_origin(hint)]


def setting_names(cls: type[Any]) -> list[str]:
    """Names of all settings, dotted."""
    return [
        name
        for section, hint in get_type_hints(cls).items()
        for name in (
            [f"{section}.{f.name}" for f in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else [section]
        )
    ]


def _one_line(message: str, cls: type[Any]) -> str:
    line = " ".join(message.split())
    unknown = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", line)
    if unknown:
        return _unknown(f"{unknown[1]}.{unknown[2]}", cls)
    unknown = re.search(r"unrecognized arguments: --([\w.]+)", line) or re.search(
        r"(?:Option|Key) '([\w.]+)' is not (?:accepted|expected)$", line
    )
    if unknown and "Parser key" not in line:
        return _unknown(unknown[1], cls)
    stray = re.search(r"unrecognized arguments: (.*)", line)
    if stray:
        return f"{stray[1]} is no option: a setting is given as --section.name value"
    typed = re.search(r"Parser key \"(\w+)(?:\.(\w+))?\": .*?(?:Got|Given) value: ?(.*)", line)
    if typed:
        hint = get_type_hints(cls)[typed[1]]
        hint, name = (get_type_hints(hint)[typed[2]], f"{typed[1]}.{typed[2]}") if typed[2] else (hint, typed[1])
        return f"{name}: expected {_type_name(hint)}, got {typed[3] or 'nothing'}"
    line = re.sub(r"^argument --([\w.]+):", r"\1:", line)
    return re.sub(r"Parser key \"([\w.]+)\":", r"\1:", line)


def _unknown(name: str, cls: type[Any]) -> str:
    """A setting of this name in another section is the likeliest; then a like one of the same section."""
    names = setting_names(cls)
    section, _, last = name.rpartition(".")
    same = [known for known in names if known.rpartition(".")[2] == last]
    if same:
        return f"there is no setting {name}: did you mean {' or '.join(same)}?"
    near = [known for known in names if known.startswith(f"{section}.")]
    return f"there is no setting {name}: {did_you_mean(name, near or list(get_type_hints(cls)))}"
