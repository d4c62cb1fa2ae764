"""Reads columns of a row; errors list the columns that exist."""

from typing import Any

from hybrid_grpo.config.tasks import Row


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
