"""Writes a command's help: a line for each of its own options and the usual settings, or one section in full."""

import dataclasses
import re
import textwrap
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from hybrid_grpo.config.commands import SftConfig
from hybrid_grpo.config.composition import about, has_effect, setting_names, settings_of
from hybrid_grpo.config.errors import did_you_mean, refuse
from hybrid_grpo.config.presets import presets
from hybrid_grpo.config.rewards import RewardConfig
from hybrid_grpo.config.train import TrainConfig
from hybrid_grpo.config.types import bounds, fields_of, type_name

_OPTIONS = {
    "--config FILE": "YAML file of settings; later files and options override earlier ones",
    "--print_config": "print all settings as YAML, and exit",
    "--help [SECTION]": "show this help, or all settings of a section",
}


def help_text(cls: Any, command: str, section: str | None) -> str:
    """Return the help of a command, or of one of its sections. Raises UserError if there is no such section."""
    return "\n".join(_section(cls, section) if section else _overview(cls, command))


def _overview(cls: Any, command: str) -> Iterator[str]:
    yield f"usage: hybrid-grpo {command} [--config FILE ...] [--section.name VALUE ...]\n"
    yield textwrap.fill(" ".join(cls.__doc__.split()), 100) + "\n"
    of_runs = {*setting_names(TrainConfig), *(() if cls is SftConfig else setting_names(SftConfig))}
    own = {f"--{name}": _brief(cls, name) for name in setting_names(cls) if name not in of_runs}
    of_command = f"in_{getattr(cls, 'command', '')}"
    places = [(getattr(about(name), of_command, about(name).usual), name) for name in setting_names(cls)]
    usual = {f"--{name}": _brief(cls, name) for _, name in sorted(filter(itemgetter(0), places), key=itemgetter(0))}
    for title, lines in (("options", _OPTIONS | own), ("settings to know first", usual)):
        if lines:
            yield f"{title}:"
            yield from (f"  {name:33} {text}" for name, text in lines.items())
            yield ""
    yield "sections, each shown in full by --help SECTION:"
    used = {name.partition(".")[0] for name in setting_names(cls) if has_effect(cls, name)}
    yield from (f"  {name:12} {_first_sentence(meaning_of(cls, name))}" for name in fields_of(cls) if name in used)


def _section(cls: Any, section: str) -> Iterator[str]:
    refuse(section not in fields_of(cls), f"there is no section {section}: {did_you_mean(section, fields_of(cls))}")
    yield textwrap.fill(f"{section}: {meaning_of(cls, section)}", 100) + "\n"
    for name, kind, default, meaning in described(cls, section):
        yield f"  {name}" if section == "rewards" else f"  --{section}.{name}"
        yield "      " + kind + (f", default {default}" if default else "")
        yield textwrap.indent(textwrap.fill(meaning, 94), "      ")


def described(cls: Any, section: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield each setting of a section: its name, the values that it takes, its default, if it has one, and meaning."""
    default = getattr(cls(), section)
    of: Any = type(default) if dataclasses.is_dataclass(default) else RewardConfig
    for key, hint in (settings_of(cls, section) or fields_of(of) if section != "features" else {}).items():
        value = getattr(default, key, of.__dataclass_fields__[key].default)
        kind = ", ".join(filter(None, [type_name(hint), bounds(hint)]))
        yield key, kind, "" if value is dataclasses.MISSING else _spelled(value), meaning_of(of, key)


def _brief(cls: Any, name: str) -> str:
    section, _, key = name.partition(".")
    value = getattr(getattr(cls(), section), key, None)
    meaning = _first_sentence(meaning_of(fields_of(cls)[section], key) if key else meaning_of(cls, section))
    return f"{meaning} ({_spelled(value)})" if value not in (None, "") else meaning


def meaning_of(of: Any, name: str) -> str:
    # The class that declares a field has the text below it.
    texts = (
        cls.__pydantic_fields__[name].description for cls in of.__mro__ if name in vars(cls).get("__annotations__", ())
    )
    text = " ".join((next(texts) or fields_of(of)[name].__doc__).split())
    return text.replace("{presets}", ", ".join(presets()))


def _first_sentence(text: str) -> str:
    # Punctuation between backticks, as in `[{function: f}]`, does not end a sentence.
    found = re.match(r"(?:`[^`]*`|.)*?(?=[.;:] |\.?$)", text)
    return found[0] if found else text


def _spelled(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value}" or "''"
