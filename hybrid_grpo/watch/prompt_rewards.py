"""Mean rewards of prompts at steps, and a map of them for a screen: prompts by time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_ENTRIES = 2**16
"""Entries of a block."""
_MOST_ENTRIES = 2**26
"""Beyond these, 800 MB, none are taken."""
_FEWEST_COLUMNS = 24
ORDERS = ("row", "mean", "last")
"""What prompts are ordered by: their row in the data, or their mean or newest reward, the lowest first."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cells:
    """A map."""

    means: Floats
    """[rows, columns]: mean reward of each cell, NaN where none of its prompts was drawn in its steps."""
    counts: npt.NDArray[np.int64]
    """[rows, columns]: how many entries each is the mean of."""
    tall: int
    """Prompts of a row; the last one may have fewer."""
    wide: int
    """Steps of a column; the last one may have fewer."""


class PromptRewards:
    """Entries of a step, a prompt, and the mean reward of the prompt's completions, in the order of the steps.

    12 bytes an entry: a hundred thousand steps of 256 prompts are 300 MB.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        """Number of each prompt, in the order of their first appearance, by its row in the data."""
        self._blocks: list[tuple[Ints, Ints, npt.NDArray[np.float32]]] = []
        """[_ENTRIES] each: steps, numbers of prompts, rewards."""
        self._entries = 0
        self.first, self.last = 0, 0
        """The first and the newest step; 0 where there is none."""

    def append(self, step: int, prompts: Any) -> None:
        """Add a step's prompts as details.jsonl has them: row in the data, mean reward, and more that is not kept.
        TrackedSteps that are none are passed over."""
        if not isinstance(prompts, list):
            return
        pairs = [
            (entry[0], entry[1])
            for entry in prompts
            if isinstance(entry, list)
            and len(entry) > 1
            and type(entry[0]) is int
            and isinstance(entry[1], int | float)
            and abs(entry[1]) < 1e30
        ][: _MOST_ENTRIES - self._entries]
        if not pairs:
            return
        if not self._entries:
            self.first = step
        self.last = step
        numbers = [self._places.setdefault(prompt, len(self._places)) for prompt, _ in pairs]
        done = 0
        while done < len(pairs):
            at = self._entries % _ENTRIES
            if at == 0:
                integers = np.zeros((2, _ENTRIES), np.int32)
                self._blocks.append((integers[0], integers[1], np.zeros(_ENTRIES, np.float32)))
            steps, places, rewards = self._blocks[-1]
            count = min(_ENTRIES - at, len(pairs) - done)
            steps[at : at + count] = step
            places[at : at + count] = numbers[done : done + count]
            rewards[at : at + count] = [reward for _, reward in pairs[done : done + count]]
            done += count
            self._entries += count

    @property
    def telling_order(self) -> str:
        """The order of `ORDERS` that shows most: means tell little of prompts that are drawn once."""
        return "mean" if self._entries >= 3 * len(self) else "row"

    def __len__(self) -> int:
        return len(self._places)

    def _filled(self) -> Iterator[tuple[Ints, Ints, npt.NDArray[np.float32]]]:
        for number, (steps, places, rewards) in enumerate(self._blocks):
            count = min(_ENTRIES, self._entries - number * _ENTRIES)
            yield steps[:count], places[:count], rewards[:count]

    def ordered(self, order: str) -> npt.NDArray[np.int64]:
        """[prompts]: rows in the data, in one of `ORDERS`."""
        rows = np.fromiter(self._places, np.int64, len(self._places))
        return rows[self._order(order)]

    def _order(self, order: str) -> npt.NDArray[np.intp]:
        rows = np.fromiter(self._places, np.int64, len(self._places))
        if order == "row":
            return np.argsort(rows, kind="stable")
        totals, last = np.zeros((2, len(rows))), np.zeros(len(rows))
        for _, places, rewards in self._filled():
            totals[0] += np.bincount(places, rewards, len(rows))
            totals[1] += np.bincount(places, minlength=len(rows))
            last[places] = rewards  # of a prompt that comes several times, the last one stays
        return np.lexsort((rows, last if order == "last" else totals[0] / totals[1]))

    def map(self, order: str, low: int, high: int, first: int, last: int, rows: int, columns: int) -> Cells:
        """Mean rewards in about so many rows and columns at most, or fewer where there is less to show.

        Rows are prompts `low` to `high` (excluded) in their order, columns the steps `first` to `last` (included). Rows
        hold as many prompts each, columns as many steps, save the last. Columns are made so wide that most cells are
        filled, whatever share of the prompts a step draws.
        """
        position = np.empty(len(self), np.int64)
        position[self._order(order)] = np.arange(len(self))
        part = (position, low, high, first, last)
        tall = max(1, -(-(high - low) // rows))
        rows = max(1, -(-(high - low) // tall))
        columns = max(
            _FEWEST_COLUMNS, min(columns, sum(len(rewards) for _, _, rewards in self._inside(*part)) // (2 * rows))
        )
        wide = max(1, -(-(last - first + 1) // columns))
        columns = max(1, -(-(last - first + 1) // wide))
        sums, counts = np.zeros(rows * columns), np.zeros(rows * columns, np.int64)
        for steps, prompts, rewards in self._inside(*part):
            cells = prompts // tall * columns + steps // wide
            sums += np.bincount(cells, rewards, rows * columns)
            counts += np.bincount(cells, minlength=rows * columns)
        means = np.divide(sums, counts, out=np.full(rows * columns, np.nan), where=counts > 0)
        return Cells(means.reshape(rows, columns), counts.reshape(rows, columns), tall, wide)

    def _inside(
        self, position: npt.NDArray[np.int64], low: int, high: int, first: int, last: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Steps counted from `first`, positions counted from `low`, and rewards, block by block."""
        for steps, places, rewards in self._filled():
            if steps[-1] >= first and steps[0] <= last:
                at = position[places]
                kept = (at >= low) & (at < high) & (steps >= first) & (steps <= last)
                yield steps[kept].astype(np.int64) - first, at[kept] - low, rewards[kept]
