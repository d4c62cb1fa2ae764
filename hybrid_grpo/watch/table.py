"""The numbers of a run in columns: one row for each step, rows appended one at a time.

A hundred thousand steps of two hundred metrics are 160 MB here, and gigabytes as dictionaries.
"""

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]
_ROWS = 1024
"""Rows of a block."""


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
        """Add a row; None is NaN. Raises ValueError or TypeError for what is no number, OverflowError for one that no
        float holds; the table is as before then."""
        values = np.array(list(row.values()), dtype=np.float64)
        names = list(row)
        if names != self._order:
            self._order = names
            self._places = np.array([self._index.setdefault(name, len(self._index)) for name in names], dtype=np.intp)
        at = self.rows % _ROWS
        if at == 0:
            self._blocks.append(np.full((_ROWS, len(self._index)), np.nan))
        block = self._blocks[-1]
        if block.shape[1] < len(self._index):
            wider = np.full((_ROWS, len(self._index)), np.nan)
            wider[:, : block.shape[1]] = block
            self._blocks[-1] = block = wider
        block[at, self._places] = values
        self.rows += 1

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
