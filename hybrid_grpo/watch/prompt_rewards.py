"""Keeps the mean rewards of prompts at steps, and draws a heat map of them: prompts by time."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK = 2**16
"""Number of entries that are processed at a time."""
_MOST_ENTRIES, _MOST_PROMPTS = 2**23, 2**19
"""Maximum number of entries, beyond which every other step is dropped, and of prompts, beyond which others are ignored:
100 MB each."""
_FEWEST_COLUMNS = 24
ORDERS = ("row", "mean", "last")
"""Orders of prompts: by their row in the data, by their mean reward or by their newest reward, lowest first."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cells:
    """A heat map of mean rewards."""

    means: Floats
    """[rows, columns]: mean reward of each cell; NaN if none of its prompts was drawn in its steps."""
    counts: npt.NDArray[np.int64]
    """[rows, columns]: number of entries over which each mean is taken."""
    tall: int
    """Number of prompts per row; the last row may have fewer."""
    wide: int
    """Number of steps per column; the last column may have fewer."""


class PromptRewards:
    """A list of entries in the order of steps: the step, a prompt, and the mean reward of the prompt's completions.

    An entry takes 12 bytes. Of a hundred thousand steps of 256 prompts, every fourth step is kept.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        """The number of each prompt, by its row in the data. Prompts are numbered in the order of first appearance."""
        self._steps, self._prompts, self._rewards = array("i"), array("i"), array("f")
        """The step of each entry, the number of its prompt, and its reward."""
        self._seen, self._stride = 0, 1

    @property
    def first(self) -> int:
        """The first step; 0 if there is none."""
        return self._steps[0] if self._steps else 0

    @property
    def last(self) -> int:
        """The newest step; 0 if there is none."""
        return self._steps[-1] if self._steps else 0

    def append(self, step: int, prompts: Any) -> None:
        """Add a step's prompts from details.jsonl, of each the row in the data and the mean reward. Skip malformed
        prompts, and a step that is not after the last one."""
        if not isinstance(prompts, list) or (self._steps and step <= self.last):
            return
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        is_full = len(self) >= _MOST_PROMPTS
        pairs = [
            (entry[0], entry[1])
            for entry in prompts
            if isinstance(entry, list)
            and len(entry) > 1
            and type(entry[0]) is int
            and isinstance(entry[1], int | float)
            and abs(entry[1]) < 1e30
            and (not is_full or entry[0] in self._numbers)
        ]
        self._steps.extend(repeat(step, len(pairs)))
        self._prompts.extend(self._numbers.setdefault(prompt, len(self._numbers)) for prompt, _ in pairs)
        self._rewards.extend(reward for _, reward in pairs)
        if len(self._steps) > _MOST_ENTRIES:
            self._halve()

    def _halve(self) -> None:
        steps = np.array(self._steps)
        kept = np.cumsum(np.diff(steps, prepend=steps[:1]) != 0, dtype=np.int32) % 2 == 0
        self._steps = array("i", steps[kept].tobytes())
        self._prompts = array("i", np.array(self._prompts)[kept].tobytes())
        self._rewards = array("f", np.array(self._rewards)[kept].tobytes())
        self._stride *= 2

    @property
    def telling_order(self) -> str:
        """The most informative of `ORDERS`: sorting by mean says little if prompts were drawn only once or twice."""
        return "mean" if len(self._steps) >= 3 * len(self) else "row"

    def __len__(self) -> int:
        return len(self._numbers)

    def _blocks(self) -> Iterator[tuple[Ints, Ints, npt.NDArray[np.float32]]]:
        """Yield the steps, prompt numbers and rewards of up to `_BLOCK` entries at a time."""
        for start in range(0, len(self._steps), _BLOCK):
            parts = (part[start : start + _BLOCK] for part in (self._steps, self._prompts, self._rewards))
            steps, prompts, rewards = map(np.array, parts)
            yield steps, prompts, rewards

    def ordered(self, order: str) -> npt.NDArray[np.int64]:
        """Return the prompts' rows in the data, [prompts], in one of `ORDERS`."""
        rows = np.fromiter(self._numbers, np.int64, len(self))
        return rows[self._order(order)]

    def _order(self, order: str) -> npt.NDArray[np.intp]:
        rows = np.fromiter(self._numbers, np.int64, len(self))
        if order == "row":
            return np.argsort(rows, kind="stable")
        totals, last = np.zeros((2, len(rows))), np.zeros(len(rows))
        for _, prompts, rewards in self._blocks():
            totals[0] += np.bincount(prompts, rewards, len(rows))
            totals[1] += np.bincount(prompts, minlength=len(rows))
            last[prompts] = rewards  # if a prompt comes several times, the last one stays
        return np.lexsort((rows, last if order == "last" else totals[0] / totals[1]))

    def map(self, order: str, low: int, high: int, first: int, last: int, rows: int, columns: int) -> Cells:
        """Return a heat map with at most about `rows` rows and `columns` columns, or fewer if there is less to show.

        Rows are the prompts `low` to `high` (exclusive) in this order, columns the steps `first` to `last` (inclusive).
        Columns are wide enough that most cells are filled, whatever share of the prompts a step draws.
        """
        position = np.empty(len(self), np.int64)
        position[self._order(order)] = np.arange(len(self))
        inside = partial(self._inside, position, low=low, high=high, first=first, last=last)
        tall = max(1, -(-(high - low) // rows))
        rows = max(1, -(-(high - low) // tall))
        entries = sum(len(rewards) for _, _, rewards in inside())
        columns = max(_FEWEST_COLUMNS, min(columns, entries // (2 * rows)))
        wide = max(1, -(-(last - first + 1) // columns))
        columns = max(1, -(-(last - first + 1) // wide))
        sums, counts = np.zeros(rows * columns), np.zeros(rows * columns, np.int64)
        for steps, prompts, rewards in inside():
            cells = prompts // tall * columns + steps // wide
            sums += np.bincount(cells, rewards, rows * columns)
            counts += np.bincount(cells, minlength=rows * columns)
        means = np.divide(sums, counts, out=np.full(rows * columns, np.nan), where=counts > 0)
        return Cells(means.reshape(rows, columns), counts.reshape(rows, columns), tall, wide)

    def _inside(
        self, position: npt.NDArray[np.int64], low: int, high: int, first: int, last: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
        """Yield, block by block, steps counted from `first`, positions counted from `low`, and rewards."""
        for steps, prompts, rewards in self._blocks():
            if steps[-1] >= first and steps[0] <= last:
                at = position[prompts]
                kept = (at >= low) & (at < high) & (steps >= first) & (steps <= last)
                yield steps[kept].astype(np.int64) - first, at[kept] - low, rewards[kept]
