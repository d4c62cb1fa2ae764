"""Finds the task that `data.task` names: a recipe, whose settings the user's own settings override.

The recipe of a ready-made task is a YAML file in `data/tasks/`, next to the functions that read its rows.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybrid_grpo.config.building import used_part
from hybrid_grpo.config.composition import setting_names
from hybrid_grpo.config.errors import did_you_mean, refuse, type_of
from hybrid_grpo.config.recipes import Settings, overlay, read_recipe, read_value
from hybrid_grpo.config.types import fields_of
from hybrid_grpo.config.user_code import functions_of, import_place

Row = dict[str, Any]

_RECIPES = Path(__file__).parents[1] / "data" / "tasks"
FAMILIES = GYM, BFCL, VERIFIERS = "gym/", "bfcl/", "verifiers/"
"""Begin the names of tasks of reasoning-gym, of the Berkeley Function Calling Leaderboard, and of verifiers."""
READY_MADE = sorted(path.stem for path in _RECIPES.glob("*.yaml") if f"{path.stem}/" not in FAMILIES)
"""Names of the other ready-made tasks."""

_HELD_OUT = ("eval_path", "eval_split", "eval_limit")
_OUTCOME = ("outcome", "threshold")
_SOURCE = ("path", "subset", "split", "limit", *_HELD_OUT)


@dataclass(frozen=True)
class TaskRecipe:
    """A task: a data set, how its rows become prompts, and how completions are rewarded."""

    row: Callable[[Row], Row]
    """Turns a row of the source into one with the `prompt` (text or chat messages), the columns of the rewards and, for
    `sft`, a `completion`. A ValueError that it raises is reported with the number of the row."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Defaults, in the form of a recipe: `{"data": {"path": ...}, "rewards": [...]}`. The first reward tells right from
    wrong in evaluation. A reward `:name` is a function in the task's own file."""
    made: Callable[[bool], Iterator[Row]] | None = None
    """Replaces `data.path` with generated rows: yields rows without end, the same ones every time. With the argument
    True it yields held-out rows, none of which occurs with False. The splits are `train` and `test`."""


def ready_made_settings(name: str) -> Settings:
    return read_recipe(_RECIPES / f"{name}.yaml")


def with_options(name: str) -> tuple[str, dict[str, Any]]:
    """Return what `gym/NAME,option=value,...` names, and the options; a value is read as YAML."""
    found, *options = re.split(r",(?=[\w.]+=)", name.partition("/")[2])
    return found, {option: read_value(value) for option, _, value in (option.partition("=") for option in options)}


def task_settings(name: str, setting: str = "data.task") -> Mapping[str, Any]:
    """Return the settings of the task `name`, the value of `setting`. Raises UserError if there is no such task."""
    if name.startswith(FAMILIES):
        return ready_made_settings(name.partition("/")[0])
    return ready_made_settings(name) if name in READY_MADE else own_task(name, setting).settings


def own_task(name: str, setting: str = "data.task") -> TaskRecipe:
    """Import a task from the user's code, `path/to/file.py:name`: a TaskRecipe, or just a function that converts rows.
    Raises UserError if the name refers to neither; the message begins with `setting`."""
    place, colon, attribute = name.rpartition(":")
    examples = [*READY_MADE, f"{GYM}countdown", f"{BFCL}simple_python"]
    refuse(
        not colon,
        f"{setting} {name}: there is no such task: {did_you_mean(name, examples)}; one of your own is given as"
        " path/to/file.py:name or package.module:name",
    )
    module = import_place(place, f"{setting} {name}")
    known = [n for n, value in vars(module).items() if isinstance(value, TaskRecipe)] + functions_of(module)
    refuse(
        not hasattr(module, attribute),
        f"{setting} {name}: {place} has no {attribute}: {did_you_mean(attribute, known)}",
    )
    found = getattr(module, attribute)
    if not isinstance(found, TaskRecipe):
        refuse(
            not callable(found),
            f"{setting} {name} is {type_of(found)}: give a TaskRecipe of hybrid_grpo.data.tasks, or a function"
            " that turns a row of the source into a row with a prompt",
        )
        found = TaskRecipe(found)
    rewards = found.settings.get("rewards", [])
    rewards = [_with_place(entry, place) for entry in (rewards.split(",") if isinstance(rewards, str) else rewards)]
    return replace(found, settings={**found.settings, "rewards": rewards})


def _with_place(entry: Any, place: str) -> Any:
    """Return an entry of `rewards`, in which `place` is put before the name of a function that is given as `:name`."""
    if isinstance(entry, Mapping):
        return {**entry, "function": _with_place(entry.get("function"), place)}
    return place + entry if isinstance(entry, str) and entry.startswith(":") else entry


def with_task(cls: Any, given: Settings) -> Settings:
    """Return the given settings, laid over the settings of the task that they name.

    Settings of the task are left out if they belong to something that the user replaces: the splits of its source if
    `data.path` is different, and its evaluation if the rewards are different.
    """
    data: Any = given.get("data")
    if isinstance(data, Mapping) and isinstance(data.get("mixture"), list):
        return {**given, "data": _with_sources(data)}
    name = data.get("task") if isinstance(data, Mapping) else None
    if not isinstance(name, str):
        return given
    # Not every command evaluates completions, or calls reward functions.
    below = used_part(cls, task_settings(name))
    source = below.setdefault("data", {}).get("path", "")
    replaced: tuple[str, ...] = ()
    if "data.path" not in setting_names(cls) or (data.get("path") or source) != source:
        replaced = _SOURCE
    elif data.get("eval_path") is not None or "eval" not in fields_of(cls):
        replaced = _HELD_OUT
    below["data"] = {key: value for key, value in below["data"].items() if key not in replaced}
    if given.get("rewards") and "eval" in below:
        below["eval"] = {key: value for key, value in below["eval"].items() if key not in _OUTCOME}
    return overlay(below, given)


def _with_sources(data: Mapping[str, Any]) -> Settings:
    """Return the section `data` with the source of every task that its mixture names, and with the tasks'
    `chat_template` if all sources are tasks with the same one."""
    mixture, templates = [], set()
    for entry in data["mixture"]:
        name = entry.get("task") if isinstance(entry, Mapping) else None
        below = task_settings(name).get("data", {}) if isinstance(name, str) else {}
        templates.add(below.get("chat_template") if below else "of no task")
        if isinstance(entry, Mapping):
            same = (entry.get("path") or below.get("path", "")) == below.get("path", "")
            entry = {
                **{key: below[key] for key in ("path", "subset", "split", "limit") if same and key in below},
                **entry,
            }
        mixture.append(entry)
    template = templates.pop() if len(templates) == 1 else None
    return {**({"chat_template": template} if template not in (None, "of no task") else {}), **data, "mixture": mixture}


def column(row: Row, *names: str) -> Any:
    """Return the value of the first of these columns that has a value; raises ValueError if none has."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"has no {' or '.join(names)}: its columns are {', '.join(row)}")


def text(row: Row, *names: str) -> str:
    """Return the same as `column`, but also raise ValueError if the value is not text."""
    value = column(row, *names)
    if not isinstance(value, str):
        raise ValueError(f"has {' or '.join(names)} {value!r:.40}, where text is expected")
    return value
