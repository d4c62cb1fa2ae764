"""Stores the metrics of a run in columns, with one row for each step; rows are appended one at a time.

A hundred thousand steps of two hundred metrics take 160 MB here; as dictionaries they would take gigabytes. A table
that is too large keeps every other row, then every fourth, and so on.
"""

import math
from array import array
from itertools import repeat

import numpy as np

from hybrid_grpo.records.charts.thinning import Column

_MOST_ROWS, _MOST_CELLS = 2**19, 25 * 10**6
"""Limits; a cell takes 8 bytes."""


class Table:
    """Rows of numbers by name, in ascending order of their steps. A number that a row lacks is NaN."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        """By name, the numbers up to the last row that has one."""
        self._last_step = -1.0
        self._seen, self._stride = 0, 1
        self.rows = 0

    @property
    def names(self) -> list[str]:
        """All names that any row had, in the order of their first appearance."""
        return list(self._columns)

    def append(self, row: dict[str, float | None]) -> bool:
        """Add a row, in which None means NaN, and return True. Return False, and leave the table as it is, if the row's
        step is not after the last one, or if a value is not a number."""
        try:
            values = np.array(list(row.values()), dtype=np.float64).tolist()
        except (TypeError, ValueError, OverflowError):
            return False
        step, new = row["step"], [name for name in row if name not in self._columns]
        if step is None or step <= self._last_step:
            return False
        self._last_step = step
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return True
        self._columns |= {name: array("d") for name in new}
        for name, value in zip(row, values, strict=True):
            column = self._columns[name]
            if len(column) < self.rows:
                column.extend(repeat(math.nan, self.rows - len(column)))
            column.append(value)
        self.rows += 1
        if self.rows > _MOST_ROWS or self.rows * len(self._columns) > _MOST_CELLS:
            self._columns = {name: column[::2] for name, column in self._columns.items()}
            self._stride, self.rows = 2 * self._stride, (self.rows + 1) // 2
        return True

    def heard(self) -> frozenset[str]:
        """Return the names of which any row has a number other than 0."""
        # Read in place: copies of all columns would take as much as the table.
        return frozenset(name for name, known in self._columns.items() if (np.abs(np.frombuffer(known)) > 0).any())

    def is_equal(self, name: str, other: str) -> bool:
        """Return whether two names have the same numbers in all rows, up to rounding."""
        one, two = (self._columns.get(each, array("d")) for each in (name, other))
        # The last number tells most of them apart.
        return len(one) == len(two) and all(
            np.allclose(one[part], two[part], rtol=1e-5, atol=1e-9, equal_nan=True)
            for part in (slice(-1, None), slice(None))
        )

    def column(self, name: str) -> Column:
        """Return the column of a name, [rows]; all NaN for an unknown name."""
        column, known = np.full(self.rows, np.nan), self._columns.get(name, array("d"))
        column[: len(known)] = known
        return column
