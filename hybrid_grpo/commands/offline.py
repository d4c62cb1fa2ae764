"""What `score` and `replay-rewards` share: scoring where nothing is sampled, and tables of what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hybrid_grpo.config import ScoringConfig
from hybrid_grpo.config.errors import UserError

if TYPE_CHECKING:
    from hybrid_grpo.rewards.loading import Reward

_FOREVER_S = 1e9

Line = tuple[str, Callable[[dict[str, Any]], Any]]
"""Of a table: its label, and what it shows of a column's record."""


def patient(scoring: ScoringConfig) -> ScoringConfig:
    """The same without a limit to the wait for all rewards: no model stands idle. A call keeps its own limit."""
    return replace(scoring, max_wait_s=_FOREVER_S)


def tokenizer_for(rewards: Sequence[Reward], place: str, whose: str, *, steps: bool = False) -> Any:
    """The tokenizer of a model folder or hub name, where a function looks at tokens; else None.

    A function that takes **kwargs may look at them or not: for such a one it is loaded where `place` is a folder.

    Args:
        steps: where `place` is a folder it is loaded for any function: it may say what pieces of the text earn.

    Raises:
        UserError: a function looks at tokens, and there is no tokenizer; it names `whose`.
    """
    naming = [
        reward.name
        for reward in rewards
        if "completion_ids" in (*reward.interface.required, *(reward.interface.accepted or ()))
    ]
    perhaps = steps or any(reward.interface.accepts("completion_ids") for reward in rewards)
    if not naming and not (perhaps and place and Path(place).is_dir()):
        return None
    why = f"rewards: {', '.join(naming)} looks at completion_ids, which are made of the texts by {whose}"
    if not place:
        raise UserError(f"{why}: set policy.model")

    from hybrid_grpo.model.loading import load_tokenizer

    try:
        return load_tokenizer(place)
    except UserError as error:
        if not naming:
            return None
        raise UserError(f"{why}: {error}") from error


def table(columns: dict[str, dict[str, Any]], lines: Sequence[Line]) -> Table:
    """A column for every record, by name."""
    made = Table(box=None, pad_edge=False)
    made.add_column("", no_wrap=True)
    for name in columns:
        made.add_column(name, justify="right", overflow="fold")
    for label, value in lines:
        made.add_row(label, *(_shown(value(column)) for column in columns.values()))
    return made


def _shown(value: Any) -> str:
    """Undefined numbers, such as a correlation with a constant, are left blank."""
    if isinstance(value, float):
        return "" if value != value else f"{value:.3f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
