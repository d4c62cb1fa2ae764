"""Tasks by name: the ready-made ones and those of the user, their settings, and their rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.config.importing import describe, functions_of, import_place
from hybrid_grpo.data.tasks.datasets import code, gsm8k, math, multiple_choice
from hybrid_grpo.data.tasks.puzzles import countdown, letters
from hybrid_grpo.data.tasks.recipe import Row, TaskRecipe

TASKS: dict[str, TaskRecipe] = {
    "gsm8k": gsm8k,
    "math": math,
    "multiple_choice": multiple_choice,
    "code": code,
    "countdown": countdown,
    "letters": letters,
}
"""By the name that `data.task` gives."""

MADE_SPLITS = ("train", "test")
"""Splits of the tasks whose rows are made."""


def load_task(name: str) -> TaskRecipe:
    """A ready-made task, or one of the user's, by `path/to/file.py:name` or `package.module:name`.

    Raises:
        UserError: there is none of this name, or what is there is neither a TaskRecipe nor a function that makes one.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        refuse(
            name not in TASKS,
            f"data.task {name}: there is no such task: {did_you_mean(name, TASKS)}; one of your own is given as"
            " path/to/file.py:name or package.module:name",
        )
        return TASKS[name]
    module = import_place(place, f"data.task {name}")
    known = [n for n, value in vars(module).items() if isinstance(value, TaskRecipe)] + functions_of(module)
    refuse(
        not hasattr(module, attribute),
        f"data.task {name}: {place} has no {attribute}: {did_you_mean(attribute, known)}",
    )
    found = getattr(module, attribute)
    if callable(found):
        try:
            found = found()
        except Exception as error:
            raise UserError(f"data.task {name}: it raised {describe(error, module.__file__)}") from error
    refuse(
        not isinstance(found, TaskRecipe),
        f"data.task {name} is a {type(found).__name__}: give a TaskRecipe of hybrid_grpo.data.tasks, or a function that"
        " makes one",
    )
    rewards = [
        replace(reward, function=f"{place}{reward.function}") if reward.function.startswith(":") else reward
        for reward in found.rewards
    ]
    return replace(found, rewards=rewards)


_SOURCE = ("path", "subset", "split", "limit")
_HELD_OUT = ("eval_path", "eval_split", "eval_limit")
_PROMPT = ("system_prompt", "chat_template")


def task_settings(
    name: str, path: str, *, own_eval: bool = False, own_rewards: bool = False, trains: bool = True
) -> dict[str, Any]:
    """The settings of a task that are to be defaults, by their dotted names.

    Those that belong to what the user replaces are left out: the splits of a source that is not the task's, and the
    evaluation by a reward that is not.

    Args:
        path: `data.path` as the user gives it; empty: the task's.
        own_eval: the user names held-out prompts.
        own_rewards: the user gives rewards.
        trains: there are rewards and an evaluation at all, as in `train`.

    Raises:
        UserError: see `load_task`.
    """
    task = load_task(name)
    own_path = path not in ("", task.path)
    fields = [*(() if own_path else _SOURCE), *_PROMPT]
    fields += _HELD_OUT if trains and not own_path and not own_eval else ()
    settings = {f"data.{field}": getattr(task, field) for field in fields}
    if trains and not own_rewards:
        settings |= {"rewards": [_entry(reward) for reward in task.rewards], "eval.threshold": task.threshold}
    return settings


def _entry(reward: RewardConfig) -> dict[str, Any]:
    """As it stands in a recipe: what is not the default."""
    plain = RewardConfig(reward.function)
    changed = {name: value for name, value in vars(reward).items() if value != getattr(plain, name)}
    return {"function": reward.function, **changed}


def make_rows(name: str, split: str | None, limit: int | None, split_setting: str) -> list[Row]:
    """The first `limit` rows that a task makes for a split.

    Raises:
        UserError: it makes none, or not of this split, or there is no limit.
    """
    made = load_task(name).made
    if made is None:
        raise UserError(f"data.path is not set, and data.task {name} makes no rows of its own: give a source")
    refuse(
        split not in MADE_SPLITS,
        f"{split_setting} {split}: data.task {name} has {' and '.join(MADE_SPLITS)}: choose one",
    )
    setting = split_setting.replace("split", "limit")
    if limit is None:
        raise UserError(f"{setting} is not set, and data.task {name} makes rows without end: say how many")
    return list(islice(made(split != "train"), limit))


def map_rows(name: str, rows: Iterable[Row], source: str) -> list[Row]:
    """Rows of a source with what the task makes of them; columns that it does not make stay as they are.

    Raises:
        UserError: the task cannot read one, which is named.
    """
    task = load_task(name)
    code = getattr(task.row, "__code__", None)  # not every callable has one
    file = code.co_filename if code else None
    mapped: list[Row] = []
    for number, row in enumerate(rows):
        where = f"data.task {name}: row {number} (from 0) of {source}"
        try:
            made = task.row(row)
        except ValueError as error:
            raise UserError(f"{where} {error}") from error
        except Exception as error:
            raise UserError(f"{where}: reading it raised {describe(error, file)}") from error
        refuse(not isinstance(made, dict), f"{where} became {made!r:.40}: return a dict with a prompt")
        mapped.append({**row, **made})
    return mapped
