"""Settings of the prompts: where they come from, how they are read, and in which order they are drawn."""

import re
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import About
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.fields import SECTION, Count, Name, Positive, Source, Switch, Text

_HELD_OUT = About(unused_by="generate chat score", may_change=True)


@dataclass(frozen=True, config=SECTION)
class MixtureConfig:
    """One source of a mixture."""

    path: Source = ""
    """File, folder or pattern of files, or hub name, as in `data.path`."""
    task: Text | None = None
    """Ready-made source and prompts, as in `data.task`; its rewards are not used."""
    subset: Text | None = None
    """Configuration name of a hub dataset."""
    split: Text = "train"
    """Split to train on, if the source has splits."""
    limit: Count | None = None
    """Read only this many rows from the start."""
    weight: Positive = 1.0
    """Weight of this source: each source's share of the prompts is its weight divided by the sum of all weights."""
    name: Name = ""
    """Name in the metrics, and in `sources` of a reward. Default: the name of the task, the file or the folder."""

    def __post_init__(self) -> None:
        if not self.name:
            origin = self.task or (self.path if isinstance(self.path, str) else "")
            name = re.sub(r"[^\w.\-]+", "_", Path(origin.rpartition(":")[2]).stem).lstrip("-")
            refuse(not name, "data.mixture: a source has neither a name, nor a path or task to be named by: set name")
            object.__setattr__(self, "name", name)


@dataclass(frozen=True, config=SECTION)
class DataConfig:
    """Prompts: where they come from and how they become tokens."""

    about = About(unused_by="chat score", rank=9)
    path: Annotated[Source, About(usual=1, in_plan=2, rank=5)] = ""
    """JSONL, JSON, CSV or parquet file, pattern or folder of such files, folder of a saved dataset, or hub name; from
    Python also a dataset or a list of rows."""
    task: Annotated[Text | None, About(usual=1, in_eval=2, unused_by="chat", rank=5)] = None
    """Ready-made source, prompts and rewards: gsm8k, math, multiple_choice, code, letters, human_eval,
    `bfcl/CATEGORY`, a generator of reasoning-gym as `gym/NAME` or `gym/NAME,option=value,...`, a taskset of verifiers
    likewise as `verifiers/ID`, or your own as `path/to/file.py:name`. All of its settings can be overridden."""
    subset: Annotated[Text | None, About(unused_by="chat")] = None
    """Configuration name of a hub dataset."""
    split: Annotated[Text, About(unused_by="eval chat")] = "train"
    """Split to train on, if the source has splits; `train[:90%]` is a part of one."""
    eval_path: Annotated[Source | None, About(in_eval=1), _HELD_OUT] = None
    """Source of the held-out prompts. Default: the same as `path`."""
    eval_split: Annotated[Text | None, _HELD_OUT] = None
    """Split to evaluate on; with neither this nor `eval_path` there is no evaluation."""
    mixture: Annotated[list[MixtureConfig], About(unused_by="eval chat score", rank=5)] = field(default_factory=list)
    """Several sources in place of `path`, `task`, `subset`, `split` and `limit`, as `[{task: gsm8k, weight: 3}, {path:
    mine.jsonl}]`. Every step draws from each source a share of the prompts in proportion to its weight, rounded up or
    down if it is not a whole number."""
    prompt_column: Annotated[Text, About(unused_by="chat")] = "prompt"
    """Column with the prompt: text, or a list of chat messages."""
    completion_column: Annotated[Text, About(unused_by="eval generate chat")] = "completion"
    """Column with the target text (`sft`), or with the text to score (`score`)."""
    image_column: Text = "images"
    """Column with the pictures of a prompt, for models that see: paths (relative to the file or folder of the data), or
    the bytes of files; one or a list."""
    max_images: Count = 8
    """Maximum number of pictures in a prompt."""
    max_pixels: Count | None = None
    """Larger pictures are reduced to this many pixels before the processor sees them. Default: only it reduces them."""
    system_prompt: Annotated[str | None, About(unused_by="")] = None
    """System message put before every prompt; it turns text prompts into chats."""
    chat_template: Annotated[Literal["auto", "always", "never"], About(unused_by="score")] = "auto"
    """`auto` applies the tokenizer's template to message lists, `always` also to text (as a user message)."""
    chat_template_kwargs: Annotated[dict[str, Any], About(unused_by="score")] = field(default_factory=dict)
    """Further variables for the template, as in `{enable_thinking: false}`. Those that it does not read are refused."""
    max_prompt_tokens: Annotated[Count, About(in_plan=2)] = 512
    """Maximum number of tokens of a prompt."""
    over_long: Annotated[Literal["drop", "refuse"], About(unused_by="chat score")] = "drop"
    """What to do with prompts of more than `max_prompt_tokens`: drop and count them, or stop."""
    shuffle: Annotated[Switch, About(unused_by="eval generate chat score")] = True
    """Draw prompts in a seeded random order, a new one every epoch."""
    limit: Annotated[Count | None, About(unused_by="eval chat")] = None
    """Read only this many rows from the start of the training split."""
    eval_limit: Annotated[Count | None, _HELD_OUT] = None
    """Read only this many rows from the start of the evaluation split."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(
            self.task is not None and self.prompt_column != "prompt",
            f"data.prompt_column {self.prompt_column}: data.task {self.task} makes the prompts: remove one of them",
        )
        self._check_mixture()
        refuse(
            bool(self.chat_template_kwargs) and self.chat_template == "never",
            f"data.chat_template_kwargs {self.chat_template_kwargs} needs a chat template, and data.chat_template is"
            " never: set it to auto, or remove data.chat_template_kwargs",
        )
        return self

    @property
    def source_names(self) -> list[str]:
        """Names of the mixture's sources; empty if there is no mixture."""
        return [source.name for source in self.mixture]

    def _check_mixture(self) -> None:
        if not self.mixture:
            return
        names = self.source_names
        twice = next((name for name in names if names.count(name) > 1), None)
        refuse(twice is not None, f"data.mixture: two sources are named {twice}: set another name for one of them")
        for name, default in (("path", ""), ("task", None), ("subset", None), ("split", "train"), ("limit", None)):
            value = getattr(self, name)
            given = value is not default and value != default
            refuse(given, f"data.{name} and data.mixture are both set: move the first into a source, or empty it")
        refuse(
            self.eval_split is not None and self.eval_path is None,
            f"data.eval_split {self.eval_split} is a split of data.path, not of data.mixture: set data.eval_path",
        )
