"""Reads columns of a row; errors list the columns that exist."""

from typing import Any

from hybrid_grpo.config.tasks import Row


def column(row: Row, *names: str) -> Any:
    """The value of the first of these columns that has one; raises ValueError if none of them does."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"has no {' or '.join(names)}: its columns are {', '.join(row)}")


def text(row: Row, *names: str) -> str:
    """Like `column`, for text; also raises ValueError if the value is not text."""
    value = column(row, *names)
    if not isinstance(value, str):
        raise ValueError(f"has {' or '.join(names)} {value!r:.40}, where text is expected")
    return value
