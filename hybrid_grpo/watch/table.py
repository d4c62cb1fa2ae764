"""The numbers of a run in columns: one row for each step, rows appended one at a time.

A hundred thousand steps of two hundred metrics take 160 MB here; as dictionaries they would take gigabytes.
"""

import math
from array import array
from itertools import repeat

import numpy as np

from hybrid_grpo.records.metrics.thinning import Column

_MOST_NAMES, _LONGEST_NAME, _MOST_CELLS = 2000, 300, 2**27
"""Far more than a run has: 2**27 cells are a gigabyte."""


class Table:
    """Rows of numbers by name, in ascending order of their steps. A number that a row does not have is NaN."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        """Each column ends at the last row that has its number."""
        self._last_step = -1.0
        self.rows = 0

    @property
    def names(self) -> list[str]:
        """All names that a row had, in the order of their first appearance."""
        return list(self._columns)

    def append(self, row: dict[str, float | None]) -> bool:
        """Add a row; None is NaN. Returns False, and leaves the table as it is, for a row that does not belong to a
        later step, holds something that is not a number, or has more names or cells than a run has."""
        try:
            values = np.array(list(row.values()), dtype=np.float64).tolist()
        except (TypeError, ValueError, OverflowError):
            return False
        step, new = row["step"], [name for name in row if name not in self._columns]
        names = len(self._columns) + len(new)
        too_many = names > _MOST_NAMES or names * self.rows > _MOST_CELLS or any(len(n) > _LONGEST_NAME for n in new)
        if step is None or step <= self._last_step or too_many:
            return False
        self._columns |= {name: array("d") for name in new}
        for name, value in zip(row, values, strict=True):
            column = self._columns[name]
            if len(column) < self.rows:
                column.extend(repeat(math.nan, self.rows - len(column)))
            column.append(value)
        self._last_step = step
        self.rows += 1
        return True

    def column(self, name: str) -> Column:
        """[rows]: the numbers of a name; all NaN for an unknown one."""
        column, known = np.full(self.rows, np.nan), self._columns.get(name, array("d"))
        column[: len(known)] = known
        return column
