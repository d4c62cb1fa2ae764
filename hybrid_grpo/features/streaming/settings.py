"""Settings of streaming: whether rows are read during the run, and the size of a block."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Count, Switch

if TYPE_CHECKING:
    from hybrid_grpo.config.data import DataConfig
    from hybrid_grpo.config.train import TrainConfig
    from hybrid_grpo.data.sources import Source
    from hybrid_grpo.features.streaming.prompt_stream import StreamedPrompts


@dataclass(frozen=True, config=SECTION)
class StreamingConfig(FeatureConfig):
    """Rows that are read during the run, for data too large to download or to hold in memory: one rank reads
    `data.path` in blocks for all ranks."""

    enabled: Switch = False
    """Read rows during the run. The files, and the rows within a block, come in a seeded random order, which is
    different in every epoch."""
    block: Count = 10_000
    """Number of rows in a block. A block is held in memory, and its rows are shuffled."""

    section = "streaming"
    streams_prompts = True

    @property
    def is_on(self) -> bool:
        """Whether rows are read during the run."""
        return self.enabled

    @model_validator(mode="after")
    def _check(self) -> StreamingConfig:
        default = type(self).__dataclass_fields__["block"].default
        refuse(
            not self.enabled and self.block != default,
            f"streaming.block {self.block} has no effect without streaming.enabled: set streaming.enabled to true, or"
            " take it out",
        )
        return self

    def check(self, config: TrainConfig) -> None:
        """Raise UserError if the source has to be read completely before the run."""
        if not self.enabled:
            return
        data = config.data
        names = ", ".join(data.source_names)
        refuse(bool(data.mixture), f"data.mixture of {names} is read whole: take out streaming, or the mixture")
        refuse(
            data.task is not None and data.path == "",
            f"data.task {data.task} makes its rows itself, so that there is nothing to stream: take out streaming",
        )
        for name, value, instead in (
            ("split", data.split if re.search(r"[\[+]", data.split) else None, "name a whole split"),
            ("limit", data.limit, "take it out: how many rows are read is decided by run.steps"),
            ("over_long", data.over_long if data.over_long == "refuse" else None, "set it to drop"),
        ):
            refuse(
                value is not None,
                f"data.{name} {value} needs all rows before the run, and streaming.enabled reads them as it goes:"
                f" {instead}",
            )

    def held_out_source(self, source: Source, data: DataConfig) -> Source:
        """Return the held-out source, streamed if it is the training source. Raises UserError if it has that split."""
        from dataclasses import replace

        same = source.path is data.path or (isinstance(source.path, str) and source.path == data.path)
        refuse(
            same and source.split == data.split,
            f"{source.split_setting} {source.split} is the split that streaming.enabled trains on: name another one, or"
            " held-out rows of their own",
        )
        return replace(source, streaming=same)

    def training_prompts(
        self, data: DataConfig, sampler: Any, seed: int, check: Callable[[list[Any]], None]
    ) -> StreamedPrompts:
        """Return the prompts of the stream. Collective."""
        from hybrid_grpo.features.streaming.prompt_stream import PromptStream, StreamedPrompts

        stream = PromptStream(data, sampler.tokenizer, seed, check, self.block, sampler.album)
        return StreamedPrompts(stream.prompts, stream.fact, stream)
