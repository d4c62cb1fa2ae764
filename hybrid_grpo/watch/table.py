"""Stores the metrics of a run in columns, with one row for each step; rows are appended one at a time.

A hundred thousand steps of two hundred metrics take 80 MB here; as dictionaries they would take gigabytes. Numbers keep
seven digits, as many as the page shows; a column with larger numbers keeps sixteen. A table that is too large keeps
every other row, then every fourth, and so on.
"""

import math
from array import array
from itertools import repeat

import numpy as np

from hybrid_grpo.records.charts.thinning import Column

_MOST_ROWS, _MOST_CELLS = 2**19, 25 * 10**6
"""Limits; a cell takes 4 bytes, or 8 if its column has numbers from `_LARGE` on."""
_LARGE = 10**7
"""From here on, a whole number has more than seven digits."""


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
        self._columns |= {name: array("f") for name in new}
        for name, value in zip(row, values, strict=True):
            column = self._columns[name]
            if abs(value) >= _LARGE and column.typecode == "f":
                column = self._columns[name] = array("d", column)
            if len(column) < self.rows:
                column.extend(repeat(math.nan, self.rows - len(column)))
            column.append(value)
        self.rows += 1
        if self.rows > _MOST_ROWS or self.rows * len(self._columns) > _MOST_CELLS:
            self._halve()
        return True

    def _halve(self) -> None:
        for name, column in self._columns.items():
            self._columns[name] = column[::2]
        self._stride, self.rows = 2 * self._stride, (self.rows + 1) // 2

    def heard(self) -> frozenset[str]:
        """Return the names of which any row has a number other than 0."""
        return frozenset(name for name, known in self._columns.items() if _has_number(known))

    def is_equal(self, name: str, other: str) -> bool:
        """Return whether two names have the same numbers in all rows, up to rounding."""
        one, two = (self._columns.get(each, array("f")) for each in (name, other))
        # The last number tells most of them apart.
        return len(one) == len(two) and all(
            np.allclose(one[part], two[part], rtol=1e-5, atol=1e-9, equal_nan=True)
            for part in (slice(-1, None), slice(None))
        )

    def column(self, name: str) -> Column:
        """Return the column of a name, [rows]; all NaN for an unknown name."""
        column, known = np.full(self.rows, np.nan), self._columns.get(name, array("d"))
        column[: len(known)] = known
        return _in_seven_digits(column) if known.typecode == "f" else column


def _in_seven_digits(column: Column) -> Column:
    """Return the decimal numbers that were written, of up to seven digits, for those that are nearest to them in 4
    bytes: 0.7 for 0.69999998."""
    size = np.abs(column)
    digits = 6 - np.floor(np.log10(size, out=np.zeros_like(column), where=size > 0))
    unit = 10.0 ** np.abs(digits)
    rounded: Column = np.where(digits >= 0, np.rint(column * unit) / unit, np.rint(column / unit) * unit)
    return rounded


def _has_number(column: "array[float]") -> bool:
    # Read in place: copies of all columns would take as much as the table.
    values = np.frombuffer(column, dtype=column.typecode)
    return bool((np.abs(values) > 0).any())
