"""Reads rows during the run, block by block, on the first rank.

A source is a list of shards: its files, or the shards of a `datasets.IterableDataset`. A pass reads the shards one
after another, in an order that depends on the seed and the epoch. Every row comes with a mark of the position after it,
so that a block can be read again from its place alone. The shuffled streams of `datasets` are not used, because their
state does not include their buffer.
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

from hybrid_grpo.config.errors import UserError, refuse, type_of
from hybrid_grpo.data.sources import (
    Files,
    Source,
    datasets_errors,
    file_rows,
    one_line,
    open_source,
    readable,
    split_name,
)
from hybrid_grpo.data.tasks import Row

PATIENCE_S = 300.0
"""Seconds for which reading an unreachable shard is retried before the run stops."""
_LONGEST_WAIT_S = 60.0
_NETWORK = {"aiohttp", "fsspec", "httpcore", "httpx", "requests", "urllib3"}
"""Libraries whose exceptions are connection errors. Not all of these exceptions are OSErrors."""


@dataclass(frozen=True)
class Place:
    """Where a block begins."""

    epoch: int = 0
    """Number of complete passes before the block."""
    block: int = 0
    """Number of blocks in this pass before the block."""
    turn: int = 0
    """Index, in the order of this pass, of the shard to read from."""
    row: int = 0
    """Number of rows of this shard before the block."""
    at: Any = None
    """The shard's mark of this position; None: the start of the shard."""


@dataclass(frozen=True)
class Shard:
    """A part of a source that is read from start to end."""

    name: str
    """Description of the shard for messages."""
    rows: Callable[[Any], Iterator[tuple[Row, Any]]]
    """The shard's rows starting at a mark (None: all), each with the mark of the next row."""


@dataclass(frozen=True)
class StreamedRow:
    """A row and where it is in the source."""

    shard: int
    """Number of the shard in the source."""
    shard_name: str
    number: int
    """Number of the row in the shard."""
    row: Row

    @property
    def where(self) -> str:
        """Description of the row for messages."""
        return f"row {self.number} (from 0) of {self.shard_name}"


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a pass, in the order in which they are drawn."""

    place: Place
    rows: list[StreamedRow]
    """`block_rows` rows; fewer or none at the end of a pass."""
    after: Place
    """Where the next block begins."""
    checksum: int
    """Checksum of the block's first row in the source, to detect that the source has changed."""


class RowStream:
    """The blocks of a source. Raises UserError if the source cannot be opened.

    Args:
        source: the source to read.
        seed: seed of the order.
        shuffle: whether shards, and rows within a block, come in a seeded order instead of the source's.
        block_rows: number of rows in a block.

    Attributes:
        patient: whether a shard that cannot be reached is tried again.
        shards: number of shards.
    """

    def __init__(self, source: Source, seed: int, shuffle: bool, block_rows: int) -> None:
        self._source, self._shards = source, open_shards(source)
        self._seed, self._shuffle, self._block_rows = seed, shuffle, block_rows
        self._last: Block | None = None
        self._open: tuple[Place, Iterator[tuple[StreamedRow, int, Any]]] | None = None
        self.patient, self.shards = False, len(self._shards)

    def block(self, place: Place) -> Block:
        """Return the block that begins at a place. If it follows the last block, reading continues; otherwise its shard
        is opened again. Raises UserError if a row cannot be read."""
        if self._last is None or self._last.place != place:
            # If reading raises, the shard is opened again the next time.
            opened, self._open, self._last = self._open, None, None
            rows = opened[1] if opened is not None and opened[0] == place else self._rows(place)
            taken = list(islice(rows, self._block_rows))
            if len(taken) == self._block_rows:
                row, turn, mark = taken[-1]
                after = Place(place.epoch, place.block + 1, turn, row.number + 1, mark)
                self._open = after, rows
            else:
                after = Place(place.epoch + 1)
            # Plus 1, because a trailing zero does not change the entropy.
            order = self._order(len(taken), place.epoch, place.block + 1)
            drawn = [taken[number][0] for number in order]
            self._last = Block(place, drawn, after, _checksum(taken[0][0].row) if taken else 0)
        return self._last

    def _order(self, count: int, *entropy: int) -> list[int]:
        if not self._shuffle:
            return list(range(count))
        return np.random.default_rng(np.random.SeedSequence([self._seed, *entropy])).permutation(count).tolist()

    def _rows(self, place: Place) -> Iterator[tuple[StreamedRow, int, Any]]:
        """Yield the rows of the pass starting at a place, each with its shard's turn and the mark of the next row."""
        order = self._order(len(self._shards), place.epoch)
        number, mark = place.row, place.at
        for turn in range(place.turn, len(order)):
            shard = self._shards[order[turn]]
            for row, after in self._shard_rows(shard, number, mark):
                yield StreamedRow(order[turn], shard.name, number, row), turn, after
                number += 1
            number, mark = 0, None

    def _shard_rows(self, shard: Shard, number: int, mark: Any) -> Iterator[tuple[Row, Any]]:
        """Yield the rows of a shard starting at `mark`, which is the mark of row `number`. A patient stream retries a
        shard that cannot be reached, after 1 s, 2 s, 4 s and so on."""
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
                    if isinstance(error, (ValueError, RuntimeError, *datasets_errors())):
                        raise UserError(f"{cannot}: {why}: correct the row, or remove it") from error
                    raise
                failing_since = failing_since or time.monotonic()
                if not self.patient or time.monotonic() - failing_since > PATIENCE_S:
                    raise UserError(f"{cannot}: {why}: check the network, or the disk") from error
                print(f"hybrid-grpo: {cannot} ({why}): trying again in {wait_s:g} s", file=sys.stderr, flush=True)
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def open_shards(source: Source) -> list[Shard]:
    """Return a source's shards. Raises UserError if it cannot be opened, has no such split, or is already in memory."""
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
            f"{source.path_setting} is {type_of(opened)}, which is already in memory: take out streaming",
        )
        count = opened.num_shards
        return [
            Shard(f"{source}" if count == 1 else f"shard {number} of {source}", partial(_rows_of, opened, number))
            for number in range(count)
        ]


def _rows_of(dataset: Any, number: int, start: int | None) -> Iterator[tuple[Row, int]]:
    """Yield shard `number` of a `datasets.IterableDataset` from row `start`: each row and the next row's number."""
    shard, first = dataset.shard(dataset.num_shards, number), start or 0
    for after, row in enumerate(shard.skip(first) if first else shard, first + 1):
        yield row, after


def _checksum(row: Row) -> int:
    # Some values, such as images, are not JSON, and their text differs between processes: use the names of their types.
    return zlib.crc32(json.dumps(row, default=lambda value: type(value).__name__).encode())


def _is_of_connection(error: Exception) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _NETWORK
