"""Prompts from a source that is read during the run, and the order in which they are drawn.

The first rank reads rows, turns them into prompts, and sends the other ranks what each step draws. So a source on the
hub is read only once, not by every rank, and only the first rank holds a block of rows. What is drawn depends only on
the seed and the position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hybrid_grpo.config import BatchPlan, DataConfig, TrainConfig
from hybrid_grpo.config.errors import RunStopped, UserError, refuse
from hybrid_grpo.data.batch import Numbers, Prompt
from hybrid_grpo.data.pictures import Album
from hybrid_grpo.data.prompts import data_line, prompts_of, read_prompt
from hybrid_grpo.data.sources import training_source
from hybrid_grpo.data.tasks import Row
from hybrid_grpo.data.tasks.registry import row_reader
from hybrid_grpo.data.training_prompts import TrainingPrompts
from hybrid_grpo.features.streaming.row_stream import Block, Place, RowStream, StreamedRow
from hybrid_grpo.model.ranks import from_first_rank, rank

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_LOOKED_AT = 1000
"""Number of rows of the first block that are turned into prompts before the run, to find errors in them."""
_AGAIN = "resume with the same, or start anew with another run.name"
_SHARD_IDS = 10**9
"""The id of a prompt is the number of its shard times this, plus the number of its row: the same in every pass."""


@dataclass(frozen=True)
class Position:
    """A position in a stream of prompts."""

    place: Place = field(default_factory=Place)
    """Where the current block begins."""
    offset: int = 0
    """Rows of this block that were drawn or dropped."""
    checksum: int | None = None
    """The checksum of this block, once it has been read."""
    drawn: int = 0
    """Prompts drawn since the run began, over all ranks."""
    over_long: int = 0
    """Rows dropped since the run began, because their prompts are too long."""


class PromptStream:
    """The prompts of a source's rows, starting at any position. The constructor and all methods are collective.

    Raises UserError on all ranks if the source cannot be read, or the first rows are not prompts; see `prompts_of`.

    Args:
        config: the source, and how its rows become prompts.
        tokenizer: the policy's.
        seed: seed of the order of shards and rows.
        check: raises UserError for prompts that the model cannot read.
        block: number of rows in a block.
        album: takes the pictures of prompts; None if the model sees none.

    Attributes:
        prompts: the prompts of some rows of the first block, the same on every rank.
        fact: a line that describes what was read.
        longest: maximum number of tokens of a prompt.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        check: Callable[[list[Prompt]], None],
        block: int,
        album: Album | None = None,
    ) -> None:
        self._album = album
        if album is not None:
            album.keeps = False
        self._config, self._tokenizer, self._check, self._block = config, tokenizer, check, block
        self._source, self.longest = replace(training_source(config), streaming=True), config.max_prompt_tokens
        self._columns: list[str] = []
        self._reader = None if config.task is None else cache(partial(row_reader, config.task))
        self._rows: RowStream | None = None
        """Set on the first rank only."""
        self.prompts, self.fact, shards = self._on_first_rank(lambda: self._look(seed), UserError)
        self._sees = any(prompt.pictures for prompt in self._taken(self.prompts))
        self.identity = {
            "seed": seed,
            "shuffle": config.shuffle,
            "block": block,
            "path": f"{shards} files",
        }

    def find(self, position: Position) -> None:
        """Raise UserError if the rows at a position have changed."""
        self._on_first_rank(lambda: self._find(position), UserError)

    def take(self, position: Position, count: int) -> tuple[list[Prompt], Position]:
        """Return the next `count` prompts starting at a position, each with its epoch, and the position after them.
        Raises RunStopped if a row is not a prompt, or cannot be read."""
        prompts, after = self._on_first_rank(lambda: self._take(position, count), RunStopped)
        return self._taken(prompts), after

    def _taken(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return prompts whose pictures are in this rank's album."""
        if self._album is not None:
            self._album.take(picture for prompt in prompts for picture in prompt.pictures)
        return prompts

    def _on_first_rank(self, work: Callable[[], T], refusal: type[UserError]) -> T:
        """Do `work` on the first rank, and return its result on all ranks. If it raises UserError, all ranks raise
        `refusal` with the same message."""
        done: tuple[Any, str | None] = None, None
        if rank() == 0:
            try:
                done = work(), None
            except UserError as error:
                done = None, str(error)
        result, refused = from_first_rank(done)
        if refused is not None:
            raise refusal(refused)
        return result

    def _look(self, seed: int) -> tuple[list[Prompt], str, int]:
        """Open the source and read the first block; returns the prompts of some of its rows, a line that describes the
        source, and the number of shards."""
        config, source = self._config, self._source
        self._rows = stream = RowStream(source, seed, config.shuffle, self._block)
        block = stream.block(Place())
        refuse(not block.rows, f"{source.path_setting} {source} is empty: it has no rows")
        read = [self._read(streamed) for streamed in block.rows]
        self._columns = list(dict.fromkeys(column for row in read for column in row))
        rows = [{column: row.get(column) for column in self._columns} for row in read[:_LOOKED_AT]]
        given = rows, source, config, self._tokenizer
        prompts = prompts_of(*given, lambda number: block.rows[number].where, self._album)
        self._check(prompts)
        stream.patient = True
        ends = ", which is all," if block.after.epoch else ""
        line = (
            f"streamed, first block {len(block.rows)} rows{ends} of which {len(rows)} were looked at:"
            f" {data_line(source, rows, prompts)} (further ones are left out); planned for prompts of"
            f" data.max_prompt_tokens {config.max_prompt_tokens}"
        )
        return prompts, line, stream.shards

    def _find(self, position: Position) -> None:
        assert self._rows is not None
        block = self._rows.block(position.place)
        refuse(
            position.checksum not in (None, block.checksum) or position.offset > len(block.rows),
            f"data.path: {self._source} has other rows at the place of the checkpoint: {_AGAIN}",
        )

    def _take(self, position: Position, count: int) -> tuple[list[Prompt], Position]:
        assert self._rows is not None
        prompts: list[Prompt] = []
        ends = 0
        while len(prompts) < count:
            block = self._rows.block(position.place)
            found, position = self._take_from(block, position, count - len(prompts))
            prompts += found
            ends = 0 if found else ends + (position.place.epoch > block.place.epoch)
            refuse(
                ends > 1,
                f"data.max_prompt_tokens {self._config.max_prompt_tokens}: {self._source} has no shorter prompt in a"
                " whole pass: raise the limit",
            )
        return prompts, position

    def _take_from(self, block: Block, position: Position, count: int) -> tuple[list[Prompt], Position]:
        """Return at most `count` prompts of a block, and the position after them."""
        prompts: list[Prompt] = []
        offset = position.offset
        while offset < len(block.rows) and len(prompts) < count:
            prompt = self._prompt(block.rows[offset])
            offset += 1
            if len(prompt.token_ids) <= self._config.max_prompt_tokens:
                prompts.append(replace(prompt, epoch=block.place.epoch))
        over_long = offset - position.offset - len(prompts)
        drawn, over_long = position.drawn + len(prompts), position.over_long + over_long
        if offset == len(block.rows):
            return prompts, Position(block.after, 0, None, drawn, over_long)
        return prompts, Position(block.place, offset, block.checksum, drawn, over_long)

    def _prompt(self, streamed: StreamedRow) -> Prompt:
        """Return the prompt of a row, even if it is over-long."""
        row = self._read(streamed)
        number = streamed.shard * _SHARD_IDS + streamed.number
        columns = {column: row.get(column) for column in self._columns}
        seen = None if self._album is None else (self._album, self._source.folder)
        prompt = read_prompt(number, columns, streamed.where, self._config, self._tokenizer, seen)
        refuse(
            bool(prompt.pictures) and not self._sees,
            f"{streamed.where} has a picture, and the rows that were read before the run have none: put some first",
        )
        self._check([prompt])
        return prompt

    def _read(self, streamed: StreamedRow) -> Row:
        """Return the row as its task converts it."""
        row, number = streamed.row, streamed.number
        return row if self._reader is None else self._reader(streamed.shard_name)(number, row)


@dataclass(frozen=True)
class StreamedPrompts(TrainingPrompts):
    """The prompts of a stream; `prompts` contains only those of some of the first rows."""

    stream: PromptStream

    @property
    def longest(self) -> int:
        """See `TrainingPrompts`. This is the limit, since later rows are not known yet."""
        return self.stream.longest

    def loader(self, config: TrainConfig, plan: BatchPlan, device: torch.device) -> StreamLoader:
        """See `TrainingPrompts`."""
        return StreamLoader(self.stream, plan, rank())


class StreamLoader:
    """Draws prompts from a stream, as `ListLoader` does from a list. Each rank gets its own part of every step.

    Success rates are not kept, since the number of prompts is not known. The number of ranks affects neither what is
    drawn nor the positions.

    Args:
        stream: the prompts.
        plan: the batch equation.
        rank: number of this rank.
    """

    def __init__(self, stream: PromptStream, plan: BatchPlan, rank: int) -> None:
        self._stream, self._rank, self._world_size = stream, rank, plan.world_size
        self._share = plan.prompts_per_rank // plan.num_minibatches
        self._num_generations = plan.num_generations
        self._position = Position()

    def next_prompts(self, batches: int) -> list[Prompt]:
        """Return this rank's prompts of the next `batches` global batches, in order, each with its epoch.
        Collective."""
        size = self._share * self._world_size
        starts = [batch * size + self._rank * self._share for batch in range(batches)]
        return self.more_prompts(batches * size, [n for start in starts for n in range(start, start + self._share)])

    def more_prompts(self, count: int, wanted: list[int]) -> list[Prompt]:
        """Draw the next `count` prompts over all ranks; returns those whose indices are `wanted`. Collective."""
        prompts, self._position = self._stream.take(self._position, count)
        return [prompts[number] for number in wanted]

    def note(self, prompts: Sequence[Prompt], outcome_B: Tensor, threshold: float) -> None:
        """Does nothing: outcomes do not affect what is drawn."""

    def update(self) -> None:
        """Does nothing: there is nothing to update after a step."""

    def tried_prompts(self) -> list[dict[str, Any]]:
        """Return an empty list, since success rates are not kept."""
        return []

    def numbers(self) -> Numbers:
        """Return metrics of the run's progress through the data, and of the rows that were dropped."""
        at = self._position
        return {
            "data/epoch": (at.place.epoch, 1),
            "progress/completions": (at.drawn * self._num_generations, 1),
            "data/streamed_rows": (at.drawn + at.over_long, 1),
            "data/over_long_rows": (at.over_long, 1),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the current position, over all ranks, and what identifies the stream; the same on every rank."""
        return {**self._stream.identity, "position": asdict(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; raises `UserError` if it belongs to another stream, with a different seed,
        block size, shuffling or rows. Collective."""
        refuse("position" not in state, f"streaming.enabled: the checkpoint was made without it: {_AGAIN}")
        for setting in ("run.seed", "data.shuffle", "streaming.block", "data.path"):
            saved, here = (of[setting.partition(".")[2]] for of in (state, self._stream.identity))
            refuse(saved != here, f"{setting}: the checkpoint was made with {saved}, this run has {here}: {_AGAIN}")
        place = Place(**state["position"]["place"])
        position = Position(**{**state["position"], "place": place})
        self._stream.find(position)
        self._position = position
