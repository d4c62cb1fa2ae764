"""The numbers of a run in columns: one row for each step, rows appended one at a time.

A hundred thousand steps of two hundred metrics are 160 MB here, and gigabytes as dictionaries.
"""

import numpy as np

from hybrid_grpo.records.metrics.thinning import Column

_ROWS = 1024
"""Rows of a block."""
_MOST_NAMES, _LONGEST_NAME, _MOST_CELLS = 2000, 300, 2**27
"""Far more than a run has: 2**27 cells are a gigabyte."""


class Table:
    """Rows of numbers by name, in ascending order of their steps. NaN stands where a row has no such number."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._order: list[str] = []
        """Names of the latest row, in their order."""
        self._places = np.zeros(0, dtype=np.intp)
        """Their columns."""
        self._blocks: list[Column] = []
        """[_ROWS, columns] each; a block has as many columns as there were names when it was last widened."""
        self.rows = 0

    @property
    def names(self) -> list[str]:
        """All names that a row had, in the order of their first appearance."""
        return list(self._index)

    def append(self, row: dict[str, float | None]) -> None:
        """Add a row; None is NaN. Raises ValueError or TypeError for what is not a number, OverflowError for one that
        no float holds, ValueError for names or rows beyond what a run has; the table is as before then."""
        values = np.array(list(row.values()), dtype=np.float64)
        names = list(row)
        if names != self._order:
            self._refuse_many({name for name in names if name not in self._index})
            self._order = names
            self._places = np.array([self._index.setdefault(name, len(self._index)) for name in names], dtype=np.intp)
        at = self.rows % _ROWS
        if at == 0:
            self._refuse_many(set())
            self._blocks.append(np.full((_ROWS, len(self._index)), np.nan))
        block = self._blocks[-1]
        if block.shape[1] < len(self._index):
            wider = np.full((_ROWS, len(self._index)), np.nan)
            wider[:, : block.shape[1]] = block
            self._blocks[-1] = block = wider
        block[at, self._places] = values
        self.rows += 1

    def _refuse_many(self, new: set[str]) -> None:
        """Raise ValueError where there is no room for a block with names that are new."""
        names = len(self._index) + len(new)
        cells = sum(block.size for block in self._blocks) + _ROWS * names
        if names > _MOST_NAMES or cells > _MOST_CELLS or any(len(name) > _LONGEST_NAME for name in new):
            raise ValueError

    def column(self, name: str) -> Column:
        """[rows]: the numbers of a name; all NaN for an unknown one."""
        place = self._index.get(name, -1)
        column = np.full(self.rows, np.nan)
        for number, block in enumerate(self._blocks):
            if 0 <= place < block.shape[1]:
                part = column[number * _ROWS : (number + 1) * _ROWS]
                part[:] = block[: len(part), place]
        return column

    def last(self, name: str) -> float:
        """The newest number of a name; NaN where there is none."""
        column = self.column(name)
        found = np.flatnonzero(~np.isnan(column))
        return float(column[found[-1]]) if found.size else float("nan")
