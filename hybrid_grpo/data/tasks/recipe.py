"""What makes up a task, and how it reads a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hybrid_grpo.config import RewardConfig

Row = dict[str, Any]


@dataclass(frozen=True)
class TaskRecipe:
    """A data set, how its rows become prompts, and what completions are worth.

    All but `row` and `made` are defaults of the settings of the same name.
    """

    row: Callable[[Row], Row]
    """Makes of a row of the source the `prompt` (text or chat messages), the columns of the rewards and, for `sft`, a
    `completion`. A ValueError of it is told with the number of the row."""
    rewards: list[RewardConfig]
    """The first tells right from wrong in evaluation. A function `:name` is one of the file that the task is in."""
    path: str = ""
    """With those up to `eval_limit`: where rows come from, in the section `data`."""
    subset: str | None = None
    split: str = "train"
    eval_path: str | None = None
    eval_split: str | None = None
    limit: int | None = None
    eval_limit: int | None = None
    made: Callable[[bool], Iterator[Row]] | None = None
    """In place of `path`: makes rows without end, always the same ones; those for True are held out, and none of them
    is among those for False. The splits are `train` and `test`."""
    system_prompt: str | None = None
    chat_template: Literal["auto", "always", "never"] = "always"
    threshold: float = 1.0
    """Of the section `eval`."""


def column(row: Row, *names: str) -> Any:
    """The first of these columns that the row has a value in.

    Raises:
        ValueError: it has none of them.
    """
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"has no {' or '.join(names)}: its columns are {', '.join(row)}")


def text(row: Row, *names: str) -> str:
    """The same, of text.

    Raises:
        ValueError: it has none of them, or one that is not text.
    """
    value = column(row, *names)
    if not isinstance(value, str):
        raise ValueError(f"has {' or '.join(names)} {value!r:.40}, where text is expected")
    return value
