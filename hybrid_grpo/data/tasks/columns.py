"""Columns of a row, read with a message for rows that lack them."""

from typing import Any

from hybrid_grpo.config.tasks import Row


def column(row: Row, *names: str) -> Any:
    """The first of these columns that the row has a value in; raises ValueError where there is none."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"has no {' or '.join(names)}: its columns are {', '.join(row)}")


def text(row: Row, *names: str) -> str:
    """The first of these columns that the row has a value in; raises ValueError where that is not a text."""
    value = column(row, *names)
    if not isinstance(value, str):
        raise ValueError(f"has {' or '.join(names)} {value!r:.40}, where text is expected")
    return value
