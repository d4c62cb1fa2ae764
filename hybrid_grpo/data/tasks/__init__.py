"""Ready-made tasks: for each name in `data.task`, a YAML file of settings and a function that converts a row.

The user's settings override the settings of the task. This package imports neither torch nor `datasets`.
"""

from collections.abc import Callable
from itertools import islice

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.tasks import BFCL, GYM, VERIFIERS, Row, TaskRecipe, column, own_task, ready_made_settings, text
from hybrid_grpo.config.user_code import describe
from hybrid_grpo.data.tasks import datasets, evaluation_sets, puzzles
from hybrid_grpo.data.tasks.evaluation_sets import bfcl_task
from hybrid_grpo.data.tasks.gym import gym_task
from hybrid_grpo.data.tasks.verifiers import verifiers_task

__all__ = ["TASKS", "Row", "TaskRecipe", "column", "load_task", "make_rows", "row_reader", "text"]

_MADE = {"letters": puzzles.make_letters, "human_eval": evaluation_sets.make_human_eval}
_READERS = (
    *(datasets.gsm8k, datasets.math, datasets.multiple_choice, datasets.code),
    *(puzzles.letters, evaluation_sets.human_eval),
)
TASKS = {f.__name__: TaskRecipe(f, ready_made_settings(f.__name__), _MADE.get(f.__name__)) for f in _READERS}
"""The built-in tasks by name in `data.task`. The function that converts a row and the YAML file have the same name."""


def load_task(name: str) -> TaskRecipe:
    """Load a built-in task, one of reasoning-gym (see `gym_task`), BFCL (see `bfcl_task`) or verifiers (see
    `verifiers_task`), or the user's own: `path/to/file.py:name` or `package.module:name` (see `own_task`)."""
    for family, load in (GYM, gym_task), (BFCL, bfcl_task), (VERIFIERS, verifiers_task):
        if name.startswith(family):
            return load(name)
    return TASKS[name] if name in TASKS else own_task(name)


def make_rows(name: str, split: str | None, limit: int | None, split_setting: str) -> list[Row]:
    """Return the first `limit` rows that a task makes for a split. Raises UserError if the task makes no rows, `split`
    is neither train nor test, or `limit` is None."""
    made = load_task(name).made
    if made is None:
        raise UserError(f"data.path is not set, and data.task {name} makes no rows of its own: give a source")
    is_split = split in ("train", "test")
    refuse(not is_split, f"{split_setting} {split}: data.task {name} has train and test: choose one")
    setting = split_setting.replace("split", "limit")
    if limit is None:
        raise UserError(f"{setting} is not set, and data.task {name} makes rows without end: say how many")
    return list(islice(made(split != "train"), limit))


def row_reader(convert: Callable[[Row], Row], setting: str, source: str) -> Callable[[int, Row], Row]:
    """Return a function that converts a row, given its number in the source; columns that `convert` does not set are
    kept. It raises UserError, which begins with `setting` and names the row, if the row cannot be converted."""
    file = getattr(getattr(convert, "__code__", None), "co_filename", None)  # not every callable has code

    def read(number: int, row: Row) -> Row:
        where = f"{setting}: row {number} (from 0) of {source}"
        try:
            made = convert(row)
        except ValueError as error:
            raise UserError(f"{where} {error}") from error
        except Exception as error:
            raise UserError(f"{where}: reading it raised {describe(error, file)}") from error
        refuse(not isinstance(made, dict), f"{where} became {made!r:.40}: return a dict with a prompt")
        return {**row, **made}

    return read
