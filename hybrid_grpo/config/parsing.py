"""Turns a command line, with YAML files and dotted overrides, into a configuration."""

import dataclasses
import os
import re
import select
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from hybrid_grpo.config.building import ConfigT, build, dump, refuse_unused, used_part
from hybrid_grpo.config.commands import RecipeReader
from hybrid_grpo.config.complaints import unknown_settings
from hybrid_grpo.config.composition import settings_of
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.help import help_text
from hybrid_grpo.config.kept_code import with_kept_code
from hybrid_grpo.config.presets import over
from hybrid_grpo.config.recipes import GivenTwice, Settings, check_text, overlay, read_recipe, read_value
from hybrid_grpo.config.sources import looks_like_path
from hybrid_grpo.config.tasks import with_task
from hybrid_grpo.config.types import YAML_WORDS, Word, fields_of, plain_types, settled, takes_mapping

AnyConfigT = TypeVar("AnyConfigT", covariant=True)


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[AnyConfigT]):
    """A parsed command line: the configuration as an object and as YAML."""

    config: AnyConfigT
    yaml: str


def parse(cls: type[ConfigT], arguments: list[str], command: str) -> Parsed[ConfigT]:
    """Parse `--config FILE` and dotted overrides into a configuration; later arguments win. Raises UserError for wrong
    arguments, and SystemExit after `--help` and `--print_config`."""
    given: Settings = {}
    typed: set[str] = set()
    unknown: list[str] = []
    print_config, rest = False, list(arguments)
    while rest:
        argument = rest.pop(0)
        check_text(argument, "an argument")
        if argument in ("-h", "--help"):
            with reader_may_leave():
                print(help_text(cls, command, rest[0] if rest and not rest[0].startswith("-") else None), flush=True)
            sys.exit(0)
        if re.match(r"\+{0,2}[a-z]\w*(\.\w+)*=", argument):  # Hydra's form
            argument = f"--{argument.lstrip('+')}"
        refuse(not argument.startswith("--"), f"{argument} is not an option: give settings as --section.name value")
        name, equals, text = argument[2:].partition("=")
        if name in ("print_config", "print-config"):
            print_config = True
            continue
        hint = None if name == "config" else _setting_type(cls, name)
        if hint is None and name != "config":
            unknown.append(name)
            while not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        if not equals:
            text = _value(name, hint, rest)
        if name == "config":
            given = _laid(given, _recipe(cls, text))
            continue
        try:
            refuse_unused(cls, _with_option({}, name, hint, text))
            given = _with_option(given, name, hint, text, typed)
            typed.add(name)
        except GivenTwice as error:
            raise UserError(f"{name} {text}: {error.problem}") from None
    if unknown:
        raise UserError(unknown_settings(unknown, cls))
    parsed = configure(cls, given)
    if print_config:
        with reader_may_leave():
            print(parsed.yaml, end="", flush=True)
        sys.exit(0)
    return parsed


def _value(name: str, hint: Any, rest: list[str]) -> str:
    """Remove the value of an option from the arguments that follow it, and return it. Several arguments are the entries
    of a list, or one that the shell has split; a switch without a value is turned on."""
    kinds = plain_types(hint)
    following = next((number for number, text in enumerate(rest) if text.startswith("--")), len(rest))
    if not following and bool in kinds:
        return "true"
    refuse(not following, f"{name}: expected one argument")
    given = rest[: following if any(get_origin(kind) is list for kind in kinds) else 1]
    del rest[: len(given)]
    check_text("".join(given), name)
    return " ".join(given) if len(given) == 1 or given[0].startswith("[") else f"[{', '.join(given)}]"


def _recipe(cls: Any, file: str) -> Settings:
    path = Path(file).expanduser()
    recipe = read_recipe(path, cls)
    if issubclass(cls, RecipeReader):  # of a run, perhaps; `train` reads the files anew
        recipe = with_kept_code(recipe, path.parent)
    for section in fields_of(cls).keys() & recipe.keys() - {"rewards", "features"}:
        has_settings = isinstance(recipe[section], dict)
        refuse(not has_settings, f"--config {file}: {section} must have settings below it, or be removed")
    return recipe


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the `with` block quietly if whoever reads standard output has closed it."""
    try:
        yield
    except BrokenPipeError:
        (poll := select.poll()).register(sys.stdout, 0)
        if not poll.poll(0):  # another pipe broke
            raise
        # Buffered output would fail once more when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def configure(cls: type[ConfigT], given: Settings) -> Parsed[ConfigT]:
    """Build the configuration from nested mappings, which override the recipe of the task that they name. A command
    that reads recipes ignores settings that it does not use. Raises UserError if a setting is wrong."""
    settings = with_task(cls, given)
    config = build(cls, used_part(cls, settings) if issubclass(cls, RecipeReader) else settings)
    return Parsed(config, dump(config))


def leading_argument(arguments: list[str], usage: str, *, optional: bool = False) -> tuple[str, list[str]]:
    """Return the first argument, empty if help is requested instead, and the options after it. Raises UserError if
    another one follows, if it is a path of nothing, or if it is missing and not `optional`."""
    first, *options = arguments or [""]
    absent = not first or (first.startswith("-") and first != "-")
    if first in ("-h", "--help") or (absent and optional):
        return "", arguments
    refuse(absent or (bool(options) and not options[0].startswith("-")), f"usage: hybrid-grpo {usage}")
    missing = first != "-" and looks_like_path(first) and not os.path.exists(first)
    refuse(missing, f"{first}: there is no such file or folder: usage: hybrid-grpo {usage}")
    return first, options


def _setting_type(cls: Any, name: str) -> Any:
    """Return the type of a setting, of a section, or of an entry of a mapping; None if there is no such setting."""
    section, *path = name.split(".")
    hint = fields_of(cls).get(section)
    if path and dataclasses.is_dataclass(hint):
        hint = settings_of(cls, section).get(path.pop(0))
        if path and takes_mapping(hint):
            return Any
    return None if path else hint


def _laid(given: Settings, above: Settings, typed: Collection[str] = ()) -> Settings:
    """Return the settings with others laid over them; see `over` for a preset. `typed`: settings given as options."""
    laid, fields = overlay(given, above), above.get("grpo")
    if isinstance(fields, Mapping):
        kept = [name.removeprefix("grpo.") for name in typed]
        laid["grpo"] = over(given.get("grpo") or {}, fields, kept)
    return laid


def _with_option(given: Settings, name: str, hint: Any, text: str, typed: Collection[str] = ()) -> Settings:
    """Return the settings with an option laid over them; `--section.name.key` sets one entry of a mapping."""
    section, *path = name.split(".")
    value = read_value(text) if path[1:] else _read(hint, text)
    if not path:
        return _laid(given, {section: value}, typed)
    key, *entries = path
    for entry in reversed(entries):
        value = {entry: value}
    value = _merged(given.get(section, {}).get(key), value) if entries else value
    return _laid(given, {section: {key: value}}, typed)


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    texts = {str(key) if type(key) is int else key: value for key, value in below.items()}
    return {**texts, **{key: _merged(texts.get(key), value) for key, value in above.items()}}


def _read(hint: Any, text: str) -> Any:
    """Return the value of an option: `1` is text for a setting that takes text, and a number for others."""
    kinds = plain_types(hint)
    if text == "null" and type(None) in kinds:
        return None
    plain = (int, float, bool, list, dict, tuple)
    others = [kind for kind in kinds if (get_origin(kind) or kind) in plain or dataclasses.is_dataclass(kind)]
    if not others:
        return settled(Word(text), hint) if text.lower() in YAML_WORDS else text
    value = read_value(text, hint)
    of_texts = any(get_origin(kind) is list and str in plain_types(get_args(kind)[0]) for kind in others)
    # One name, or several with commas, instead of a list.
    is_list = of_texts and isinstance(value, str) and value and not any(get_origin(kind) is Literal for kind in kinds)
    if not is_list:
        return value
    return [] if value == "none" else [part.strip() for part in value.split(",")]
