"""Rows that are read as the run goes, block by block, on the first rank.

A source is a list of shards: its files, or the shards of a `datasets.IterableDataset`. A pass reads the shards one
after the other, in an order that depends on the seed and the epoch. Every row comes with the place after it, so that a
block can be read again from its place alone. The shuffled streams of `datasets` are not used, as their buffer is no
part of their state.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.sources import Files, Source, file_rows, one_line, open_source, readable, split_name
from hybrid_grpo.data.tasks import Row

PATIENCE_S = 300.0
"""For so long a shard that cannot be reached is tried again, before the run stops."""
_LONGEST_WAIT_S = 60.0
_NETWORK = {"aiohttp", "fsspec", "httpcore", "httpx", "requests", "urllib3"}
"""Libraries whose errors are those of a connection. Not all of them are OSErrors."""


@dataclass(frozen=True)
class Place:
    """Where a block begins."""

    epoch: int = 0
    """Passes before."""
    block: int = 0
    """Blocks of the pass before."""
    turn: int = 0
    """Shards of the pass before."""
    row: int = 0
    """Rows of the shard before."""
    at: Any = None
    """The shard's own mark of that row; None: its start."""


@dataclass(frozen=True)
class Shard:
    """A part of a source that is read from its start to its end."""

    name: str
    """In words, for messages."""
    rows: Callable[[Any], Iterator[tuple[Row, Any]]]
    """Its rows from a mark on (None: all), each with the mark of the row after it."""


@dataclass(frozen=True)
class StreamedRow:
    """A row and where it stands."""

    shard: int
    """Number of its shard in the source."""
    shard_name: str
    number: int
    """Number of the row in its shard."""
    row: Row

    @property
    def where(self) -> str:
        """The row in words, for messages."""
        return f"row {self.number} (from 0) of {self.shard_name}"


@dataclass(frozen=True)
class Block:
    """Rows that follow each other in the source, in the order in which they are drawn."""

    place: Place
    rows: list[StreamedRow]
    """`block_rows`, or fewer at the end of a pass, where it may also be none."""
    after: Place
    """Where the next block begins."""
    checksum: int
    """Of its first row in the source: tells whether it is still the block that it was."""


class RowStream:
    """The blocks of a source.

    Args:
        source: what is read; raises UserError where it cannot be opened.
        seed: of the order.
        shuffle: whether shards, and rows within a block, come in a seeded order or in the source's.
        block_rows: rows of a block.

    Attributes:
        patient: whether a shard that cannot be reached is tried again.
        shards: how many there are.
    """

    def __init__(self, source: Source, seed: int, shuffle: bool, block_rows: int) -> None:
        self._source, self._shards = source, open_shards(source)
        self._seed, self._shuffle, self._block_rows = seed, shuffle, block_rows
        self._last: Block | None = None
        self._open: tuple[Place, Iterator[tuple[StreamedRow, int, Any]]] | None = None
        self.patient, self.shards = False, len(self._shards)

    def block(self, place: Place) -> Block:
        """The block that begins at a place: the next one at the cost of its rows, another one by reading its shard
        again. Raises UserError where a row cannot be read."""
        if self._last is None or self._last.place != place:
            # A source that has raised is opened anew.
            opened, self._open, self._last = self._open, None, None
            rows = opened[1] if opened is not None and opened[0] == place else self._rows(place)
            taken = list(islice(rows, self._block_rows))
            if len(taken) == self._block_rows:
                row, turn, mark = taken[-1]
                after = Place(place.epoch, place.block + 1, turn, row.number + 1, mark)
                self._open = after, rows
            else:
                after = Place(place.epoch + 1)
            # An entropy of zero would be as if it were not given.
            order = self._order(len(taken), place.epoch, place.block + 1)
            drawn = [taken[number][0] for number in order]
            self._last = Block(place, drawn, after, _checksum(taken[0][0].row) if taken else 0)
        return self._last

    def _order(self, count: int, *entropy: int) -> list[int]:
        if not self._shuffle:
            return list(range(count))
        return np.random.default_rng(np.random.SeedSequence([self._seed, *entropy])).permutation(count).tolist()

    def _rows(self, place: Place) -> Iterator[tuple[StreamedRow, int, Any]]:
        """The rows of the pass from a place on, each with the turn of its shard and the mark after it."""
        order = self._order(len(self._shards), place.epoch)
        number, mark = place.row, place.at
        for turn in range(place.turn, len(order)):
            shard = self._shards[order[turn]]
            for row, after in self._shard_rows(shard, number, mark):
                yield StreamedRow(order[turn], shard.name, number, row), turn, after
                number += 1
            number, mark = 0, None

    def _shard_rows(self, shard: Shard, number: int, mark: Any) -> Iterator[tuple[Row, Any]]:
        """The rows of a shard from a mark on, which stands before the row of a number. Where it cannot be reached, it
        is tried again after 1 s, 2 s, 4 s and so on."""
        from datasets.exceptions import DatasetsError

        failing_since, wait_s = 0.0, 1.0
        while True:
            try:
                for row, after in shard.rows(mark):
                    failing_since, wait_s = 0.0, 1.0
                    yield row, after
                    number, mark = number + 1, after
                return
            except UserError:
                raise
            except Exception as error:
                cannot = f"{self._source.path_setting} {shard.name} cannot be read at row {number} (from 0)"
                why = f"{type(error).__name__} {one_line(error)}"
                if not _is_of_connection(error):
                    if isinstance(error, ValueError | RuntimeError | DatasetsError):
                        raise UserError(f"{cannot}: {why}: correct the row, or remove it") from error
                    raise
                failing_since = failing_since or time.monotonic()
                if not self.patient or time.monotonic() - failing_since > PATIENCE_S:
                    raise UserError(f"{cannot}: {why}: check the network, or the disk") from error
                print(f"hybrid-grpo: {cannot} ({why}): trying again in {wait_s:g} s", file=sys.stderr, flush=True)
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def open_shards(source: Source) -> list[Shard]:
    """The shards of a source. Raises UserError where it cannot be opened, has no such split, or is not a stream."""
    import datasets

    with readable(source):
        splits = open_source(source)
        opened: Any = splits[split_name(source, source.split, list(splits))]
        if isinstance(opened, Files):
            return [Shard(str(path), partial(file_rows, path, source)) for path in opened.paths]
        if isinstance(opened, datasets.Dataset):
            opened = opened.to_iterable_dataset(num_shards=max(1, len(opened.cache_files)))
        refuse(
            not isinstance(opened, datasets.IterableDataset),
            f"{source.path_setting} is a {type(opened).__name__}, which is in memory as it is: take out streaming",
        )
        count = opened.num_shards
        return [
            Shard(f"{source}" if count == 1 else f"shard {number} of {source}", partial(_rows_of, opened, number))
            for number in range(count)
        ]


def _rows_of(dataset: Any, number: int, start: int | None) -> Iterator[tuple[Row, int]]:
    """The rows of a shard of a `datasets.IterableDataset` from a number on, each with the number of the next."""
    shard, first = dataset.shard(dataset.num_shards, number), start or 0
    for after, row in enumerate(shard.skip(first) if first else shard, first + 1):
        yield row, after


def _checksum(row: Row) -> int:
    # Some values, such as images, are no JSON, and are written differently in every process.
    return zlib.crc32(json.dumps(row, default=lambda value: type(value).__name__).encode())


def _is_of_connection(error: Exception) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK
