"""The help of a command: its own options and the usual settings in a line each, and every section at length."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from hybrid_grpo.config.building import bounds, sections, to_dict, type_name
from hybrid_grpo.config.commands import TrainConfig
from hybrid_grpo.config.errors import UserError, did_you_mean
from hybrid_grpo.config.rewards import RewardConfig

_USUAL = [
    "policy.model",
    "data.path",
    "data.task",
    "rewards",
    "run.name",
    "run.steps",
    "run.seed",
    "run.resume",
    "policy.lr",
    "policy.dtype",
    "rollout.prompts_per_step",
    "rollout.num_generations",
    "rollout.max_completion_tokens",
    "rollout.temperature",
    "grpo.loss_type",
    "grpo.beta",
    "engine.zero_stage",
    "eval.every",
    "checkpoint.every",
    "log.wandb",
]
"""Settings that most people touch first."""


def help_text(cls: Any, command: str, section: str | None) -> str:
    """The help of a command, or of one section of its settings.

    Raises:
        UserError: there is no such section.
    """
    lines = _section(cls, section) if section else _overview(cls, command)
    return "\n".join(lines)


def _overview(cls: Any, command: str) -> Iterator[str]:
    yield f"usage: hybrid-grpo {command} [--config FILE ...] [--section.name VALUE ...]\n"
    yield textwrap.fill(" ".join(cls.__doc__.split()), 100) + "\n"
    own = [name for name in sections(cls) if name not in sections(TrainConfig)]
    names = [f"{section}.{key}" for section in own for key in sections(sections(cls)[section])]
    usual = [name for name in _USUAL if name.partition(".")[0] in sections(cls)]
    options = {
        "--config FILE": "YAML file of settings; of several files and options the later ones win",
        "--print_config": "print all settings as YAML, and end",
        "--help [SECTION]": "this help, or all settings of a section",
    }
    for title, entries in (
        ("options", options),
        ("settings of this command", dict(_brief(cls, name) for name in names)),
        ("settings to know first", dict(_brief(cls, name) for name in usual)),
    ):
        if entries:
            yield f"{title}:"
            yield from (f"  {name:34} {text}" for name, text in entries.items())
            yield ""
    yield "sections, each shown at length by --help SECTION:"
    for name in sections(cls):
        yield f"  {name:12} {_first_sentence(_meaning(cls, name))}"


def _brief(cls: Any, name: str) -> tuple[str, str]:
    section, _, key = name.partition(".")
    if not key:
        return f"--{name}", _first_sentence(_meaning(cls, name))
    of = sections(cls)[section]
    default = getattr(getattr(cls(), section), key)
    shown = "" if default in (None, "", [], {}) else f" ({_spelled(default)})"
    return f"--{name}", f"{_first_sentence(of.__pydantic_fields__[key].description)}{shown}"


def _section(cls: Any, section: str) -> Iterator[str]:
    hint = sections(cls).get(section)
    if hint is None:
        raise UserError(f"there is no section {section}: {did_you_mean(section, sections(cls))}")
    yield f"{section}: {_meaning(cls, section)}\n"
    of: Any = hint if dataclasses.is_dataclass(hint) else RewardConfig
    defaults = to_dict(cls()).get(section)
    for key, kind in sections(of).items():
        field = of.__pydantic_fields__[key]
        limits = f", {bounds(kind)}" if bounds(kind) else ""
        default = ""
        if isinstance(defaults, dict):
            default = f"; default {_spelled(defaults[key])}"
        elif not field.is_required():
            default = f"; default {_spelled(field.get_default(call_default_factory=True))}"
        yield f"  --{section}.{key}" if of is hint else f"  {key}"
        yield f"      {type_name(kind)}{limits}{default}"
        yield textwrap.fill(
            " ".join(field.description.split()), 100, initial_indent="      ", subsequent_indent="      "
        )


def _meaning(cls: Any, section: str) -> str:
    description = cls.__pydantic_fields__[section].description or sections(cls)[section].__doc__
    return " ".join(description.split())


def _first_sentence(text: str) -> str:
    text = " ".join(text.split())
    end = min((text.find(mark) for mark in (". ", "; ", ": ") if mark in text), default=len(text))
    return text[:end].rstrip(".")


def _spelled(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else "''"
