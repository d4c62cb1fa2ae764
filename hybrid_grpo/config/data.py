"""Settings of the prompts: where they come from, how they are read, and in which order they are drawn."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, PositiveShare, Share, Source, Switch, Text


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
    prompt_column: Text = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    completion_column: Text = "completion"
    """Column with the target text (`sft`), or with the text to score (`score`)."""
    system_prompt: str | None = None
    """System message put before every prompt; makes text prompts into chats."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """`auto` applies the tokenizer's template to message lists, `always` also to text (as a user message)."""
    max_prompt_tokens: Count = 512
    """Longest prompt that is kept."""
    over_long: Literal["drop", "refuse"] = "drop"
    """What to do with longer prompts: drop and count them, or stop."""
    shuffle: Switch = True
    """Draw prompts in a seeded random order, a new one every epoch."""
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
        return self


@dataclass(frozen=True, config=SECTION)
class CurriculumConfig:
    """Which prompts are drawn, by how often they are solved. A completion solves its prompt when the reward named by
    `eval.outcome` is at least `eval.threshold`."""

    sampling: Literal["uniform", "difficulty"] = "uniform"
    """`uniform` passes over all prompts, in an order that does not depend on success. `difficulty` draws prompts in
    proportion to what their groups are expected to teach: the probability that the completions are neither all right
    nor all wrong, times the share that is still wrong."""
    column: Text | None = None
    """Column that tells how hard a prompt is, such as a level or a topic, or a text by its length. A prompt that was
    not tried yet is expected to be solved as often as those with a similar value. Default: the prompt's length."""
    skip_above: Share | None = None
    """Leave out prompts with a known success rate of at least this: they are solved."""
    skip_below: Share | None = None
    """Leave out prompts with a known success rate of at most this: they are out of reach."""
    min_tries: Count = 4
    """Completions, discounted by their age, that a success rate must rest on before skip_above and skip_below use it. A
    prompt that was left out comes back when its completions have aged."""
    half_life: Count = 50
    """Steps after which a completion counts half in the success rate, since the policy that wrote it has changed."""
    floor: PositiveShare = 0.05
    """Weight of prompts that teach nothing or are left out, where the best prompt has 1. It keeps them from being
    forgotten."""

    @model_validator(mode="after")
    def _check(self) -> CurriculumConfig:
        low, high = self.skip_below, self.skip_above
        refuse(
            low is not None and high is not None and low >= high,
            f"curriculum.skip_below {low} and curriculum.skip_above {high} leave out everything: set the first lower",
        )
        follows = self.sampling == "difficulty"
        for name, default, used, way_out in (
            ("min_tries", 4, self.skips, "without curriculum.skip_above or curriculum.skip_below"),
            ("column", None, follows, "with curriculum.sampling uniform: set that to difficulty"),
            ("floor", 0.05, follows or self.skips, "with curriculum.sampling uniform: set that to difficulty"),
        ):
            value = getattr(self, name)
            refuse(not used and value != default, f"curriculum.{name} {value} has no effect {way_out}, or take it out")
        return self

    @property
    def skips(self) -> bool:
        """Whether prompts are left out by their success rate."""
        return self.skip_below is not None or self.skip_above is not None
