"""Settings of the prompts: where they come from, how they are read, and in which order they are drawn."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, Share, Source, Switch, Text


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
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further variables of the tokenizer's template, as in `{enable_thinking: false}`. One that the template does not
    read is refused."""
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
        refuse(
            bool(self.chat_template_kwargs) and self.chat_template == "never",
            f"data.chat_template_kwargs {self.chat_template_kwargs} needs a chat template, and data.chat_template is"
            " never: set it to auto, or take out data.chat_template_kwargs",
        )
        return self


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
