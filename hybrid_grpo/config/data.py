"""Settings of the prompts: where they come from, how they are read, and in which order they are drawn."""

from __future__ import annotations

import re
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, Name, Positive, Share, Source, Switch, Text


@dataclass(frozen=True, config=SECTION)
class MixtureConfig:
    """One source of a mixture."""

    path: Source = ""
    """JSONL or parquet file, folder of a saved dataset, or hub name."""
    task: Text | None = None
    """Ready-made source and prompts, as in `data.task`; its rewards are not taken over."""
    subset: Text | None = None
    """Configuration name of a hub dataset."""
    split: Text = "train"
    """Split to train on, where the source has splits."""
    limit: Count | None = None
    """Read only this many rows from the start."""
    weight: Positive = 1.0
    """Share of the prompts, compared with the weights of the other sources."""
    name: Name = ""
    """Name in the metrics and for the rewards. Default: that of the task, or of the file or folder."""

    def __post_init__(self) -> None:
        if not self.name:
            origin = self.task or (self.path if isinstance(self.path, str) else "")
            name = re.sub(r"[^\w.\-]+", "_", Path(origin.rpartition(":")[2]).stem).lstrip("-")
            refuse(not name, "data.mixture: a source has neither a name, nor a path or task to be named by: set name")
            object.__setattr__(self, "name", name)


@dataclass(frozen=True, config=SECTION)
class DataConfig:
    """Prompts: where they come from and how they become tokens."""

    path: Source = ""
    """JSONL or parquet file, folder of a saved dataset, or hub name; from Python also a dataset or a list of rows."""
    task: Text | None = None
    """Ready-made source, prompts and rewards, of which every setting can be overridden: gsm8k, math, multiple_choice,
    code, countdown, letters, or one of your own, `path/to/file.py:name`."""
    subset: Text | None = None
    """Configuration name of a hub dataset."""
    split: Text = "train"
    """Split to train on, where the source has splits; a part of it as in `train[:90%]`."""
    eval_path: Source | None = None
    """Source of the held-out prompts. Default: the same as `path`."""
    eval_split: Text | None = None
    """Split to evaluate on; with neither this nor `eval_path` there is no evaluation."""
    mixture: list[MixtureConfig] = field(default_factory=list)
    """Several sources in place of `path`, `task`, `subset`, `split` and `limit`, as
    `[{task: gsm8k, weight: 3}, {path: mine.jsonl}]`. Every step draws of each its share by weight: exactly that
    where it is a whole number of prompts, else one of the whole numbers next to it."""
    prompt_column: Text = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    completion_column: Text = "completion"
    """Column with the target text (`sft`), or with the text to score (`score`)."""
    system_prompt: str | None = None
    """System message put before every prompt; makes text prompts into chats."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies the tokenizer's template to message lists, `always` also to text (as a user message)."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the tokenizer's template, as in `{enable_thinking: false}`. One that the template does not
    read is refused."""
    max_prompt_tokens: Count = 512
    """Longest prompt that is kept."""
    over_long: Literal["drop", "refuse"] = "drop"
    """What to do with longer prompts: drop and count them, or stop."""
    shuffle: Switch = True
    """Draw prompts in a seeded random order, a new one every epoch."""
    streaming: Switch = False
    """Read rows as they come, for data too large to download or to hold: `path` is read in blocks, by one rank for
    all. Files come in a seeded random order, another one every epoch, and rows in one within their block."""
    stream_block: Count = 10_000
    """Rows of one block of a stream, which are held in memory and shuffled among each other."""
    limit: Count | None = None
    """Read only this many rows from the start of the training split."""
    eval_limit: Count | None = None
    """Read only this many rows from the start of the evaluation split."""

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        refuse(
            self.task is not None and self.prompt_column != "prompt",
            f"data.prompt_column {self.prompt_column}: data.task {self.task} makes the prompts, of other columns: take"
            " out one of them",
        )
        self._check_mixture()
        self._check_streaming()
        refuse(
            bool(self.chat_template_kwargs) and self.chat_template == "never",
            f"data.chat_template_kwargs {self.chat_template_kwargs} needs a chat template, and data.chat_template is"
            " never: set it to auto, or take out data.chat_template_kwargs",
        )
        return self

    @property
    def source_names(self) -> list[str]:
        """Names of the sources of a mixture; none without one."""
        return [source.name for source in self.mixture]

    def check_stream(self, *, follows: bool) -> None:
        """Refuse a curriculum that `follows` success rates, which a stream does not keep."""
        refuse(
            self.streaming and follows,
            "data.streaming keeps no success rates, which the settings of curriculum follow: take out one of the two",
        )

    def _check_streaming(self) -> None:
        if not self.streaming:
            default = type(self).__dataclass_fields__["stream_block"].default
            refuse(
                self.stream_block != default,
                f"data.stream_block {self.stream_block} has no effect without data.streaming: set data.streaming to"
                " true, or take it out",
            )
            return
        names = ", ".join(self.source_names)
        refuse(bool(self.mixture), f"data.mixture of {names} is read whole: take out data.streaming, or the mixture")
        refuse(
            self.task is not None and self.path == "",
            f"data.task {self.task} makes its rows itself, so that there is nothing to stream: take out data.streaming",
        )
        for name, value, instead in (
            ("split", self.split if re.search(r"[\[+]", self.split) else None, "name a whole split"),
            ("limit", self.limit, "take it out: how many rows are read is decided by run.steps"),
            ("over_long", self.over_long if self.over_long == "refuse" else None, "set it to drop"),
        ):
            refuse(
                value is not None,
                f"data.{name} {value} needs all rows before the run, and data.streaming reads them as they come:"
                f" {instead}",
            )

    def _check_mixture(self) -> None:
        if not self.mixture:
            return
        names = self.source_names
        twice = next((name for name in names if names.count(name) > 1), None)
        refuse(twice is not None, f"data.mixture: two sources are named {twice}: set another name for one of them")
        for name, default in (("path", ""), ("task", None), ("subset", None), ("split", "train"), ("limit", None)):
            value = getattr(self, name)
            given = value is not default and value != default
            refuse(given, f"data.{name} and data.mixture are both set: move {name} into a source of the mixture")
        refuse(
            self.eval_split is not None and self.eval_path is None,
            f"data.eval_split {self.eval_split} is a split of data.path, and data.mixture has several sources: set"
            " data.eval_path",
        )


@dataclass(frozen=True, config=SECTION)
class CurriculumConfig:
    """Which prompts are drawn, by how often they are solved. A completion solves its prompt when the reward named by
    `eval.outcome` is at least `eval.threshold`."""

    sampling: Literal["uniform", "difficulty"] = "uniform"
    """`uniform` passes over all prompts, in an order that does not depend on success. `difficulty` draws prompts in
    proportion to what their groups are expected to teach: the probability that the completions are neither all right
    nor all wrong, times the share that is still wrong. A prompt that was not tried yet is expected to be solved as
    often as those of similar length."""
    skip_above: Share | None = None
    """Leave out prompts with a known success rate of at least this: they are solved. A rate is known by 4 completions
    or more, discounted by their age, so a prompt comes back when its completions have aged."""
    skip_below: Share | None = None
    """Leave out prompts with a known success rate of at most this: they are out of reach."""

    @model_validator(mode="after")
    def _check(self) -> CurriculumConfig:
        low, high = self.skip_below, self.skip_above
        refuse(
            low is not None and high is not None and low >= high,
            f"curriculum.skip_below {low} and curriculum.skip_above {high} leave out everything: set the first lower",
        )
        return self

    @property
    def follows(self) -> bool:
        """Whether success rates change the stream of prompts."""
        return self.sampling == "difficulty" or self.skip_below is not None or self.skip_above is not None
