"""Completions that exist already: rows that other programs or people wrote, and the rollouts that a run saved.

Both become the records that reward functions are called with. Neither holds the tokens of a completion. A tokenizer,
where one is given, makes them again from the text.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Rollout, Scores
from hybrid_grpo.data.prompts import prompt_text
from hybrid_grpo.data.sources import Row, Source, json_rows, read_rows, standard_input

UNKNOWN_TOKEN = -1
"""Stands for a token of a saved rollout that cannot be made from the text again."""
_FIELDS = (
    "step", "group", "sample", "prompt_id", "prompt", "completion", "reward", "rewards", "advantage", "length",
    "finish", "columns",
)  # fmt: skip
"""What a line of a saved rollout must have. Numbers that JSON cannot hold, such as NaN, are null."""


def read_completions(path: str, config: DataConfig, stdin: Iterable[bytes], tokenizer: Any = None) -> list[Rollout]:
    """The rows of a source as in `data.path`, or of standard input (`-`), each as a rollout of one group.

    A row has a prompt, and a completion in the column `data.completion_column`, or a list of completions in the column
    of that name with an `s` behind it. A completion is text, or a chat that ends with the assistant's message. All
    other columns are for the reward functions. Those in a mapping called `columns`, which `generate` and the rollouts
    of a run have, are treated like columns of the row.

    Args:
        tokenizer: makes the tokens of completions; without one they have none.

    Returns:
        Rollouts without tokens of prompts and without log-probabilities. The id of a prompt is the number of its row,
        from 0, and every completion counts as one that ended by itself.

    Raises:
        UserError: the source cannot be read, or a row has no prompt or no completion.
    """
    # A file has no subsets: a subset in the recipe belongs to the recipe's own source.
    subset = None if Path(path).is_file() else config.subset
    source = Source(path, config.split, subset, config.limit, path_setting="SOURCE")
    source = standard_input(stdin, "SOURCE", config.limit) if path == "-" else source
    return [
        _group(number, row, f"row {number} (from 0) of {source.origin}", config, tokenizer)
        for number, row in enumerate(read_rows(source))
    ]


def _group(number: int, row: Row, where: str, config: DataConfig, tokenizer: Any) -> Rollout:
    prompt_column, one, many = config.prompt_column, config.completion_column, f"{config.completion_column}s"
    if row.get(prompt_column) is None:
        raise UserError(
            f"data.prompt_column {prompt_column}: {where} has none there: {did_you_mean(prompt_column, row)}"
        )
    column = one if row.get(one) is not None else many
    if row.get(column) is None:
        raise UserError(f"data.completion_column {one}: {where} has neither {one} nor {many}: {did_you_mean(one, row)}")
    texts = _texts(row[column], f"{column}: {where}")
    columns = {name: value for name, value in row.items() if name not in (prompt_column, one, many)}
    if isinstance(columns.get("columns"), dict | None):
        columns |= columns.pop("columns", None) or {}
    # What `generate` and a run have written starts with the recipe's system message already.
    has_system = isinstance(row[prompt_column], list) and row[prompt_column][:1] == [
        {"role": "system", "content": config.system_prompt}
    ]
    text = prompt_text(row, where, replace(config, system_prompt=None) if has_system else config)
    completions = [Completion(_tokens(text, tokenizer), [], "stop", text) for text in texts]
    return Rollout([Prompt(number, text, [], columns)], completions, len(completions))


def _texts(value: Any, where: str) -> list[str]:
    """The completions of a row; the value is one, or a list of several."""
    several = isinstance(value, list) and bool(value) and not isinstance(value[0], dict)
    texts = []
    for given in value if several else [value]:
        is_chat = isinstance(given, list) and bool(given) and isinstance(given[-1], dict)
        text = given[-1].get("content") if is_chat and given[-1].get("role") == "assistant" else given
        if not isinstance(text, str):
            raise UserError(f"{where} has {given!r:.40}: give text, or a chat that ends with the assistant's message")
        texts.append(text)
    return texts


def _tokens(text: str, tokenizer: Any) -> list[int]:
    return [] if tokenizer is None else list(tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class SavedStep:
    """One step of a run, of all ranks, as its file in rollouts/ has it."""

    step: int
    rollout: Rollout
    """Without log-probabilities, and without tokens of prompts."""
    scores: Scores
    """Rewards of steps of a text are not saved, only their sums."""
    advantages_B: Tensor
    """float32, mean over the tokens of a completion."""
    retokenized: int
    """Completions whose text, made into tokens again, has as many tokens as were sampled."""


def saved_files(run: Path) -> dict[int, Path]:
    """The file of every saved step of a run, in the order of steps."""
    files = {path.stem.partition("_")[2]: path for path in (run / "rollouts").glob("step_*.jsonl")}
    return {int(step): files[step] for step in sorted(filter(str.isdigit, files), key=int)}


def read_step(path: Path, tokenizer: Any = None) -> SavedStep:
    """Read the file of one step; without a tokenizer every token is `UNKNOWN_TOKEN`.

    Raises:
        UserError: the file cannot be read, a line is not as a run writes it, or a group is not complete.
    """
    try:
        with path.open("rb") as lines:
            numbered = list(json_rows(lines, str(path)))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    refuse(not numbered, f"{path} is empty: remove it")
    for number, row in numbered:
        missing = next((name for name in _FIELDS if name not in row), None)
        refuse(missing is not None, f"{path} line {number} has no {missing}: it is not as a run writes it")
    size = _group_size(numbered, path)
    rows = [row for _, row in numbered]
    tokens = [_saved_tokens(row, tokenizer) for row in rows]
    completions = [
        Completion(ids, [], row["finish"], row["completion"]) for row, (ids, _) in zip(rows, tokens, strict=True)
    ]
    prompts = [Prompt(row["prompt_id"], row["prompt"], [], row["columns"]) for row in rows[::size]]
    names = dict.fromkeys(name for row in rows for name in row["rewards"])
    scores = Scores(
        _numbers(row["reward"] for row in rows),
        {name: _numbers(row["rewards"].get(name) for row in rows) for name in names},
        {name: torch.tensor([_status(row, name) for row in rows], dtype=torch.int8) for name in names},
    )
    advantages_B = _numbers(row["advantage"] for row in rows).float()
    whole = sum(complete for _, complete in tokens)
    return SavedStep(rows[0]["step"], Rollout(prompts, completions, size), scores, advantages_B, whole)


def _group_size(numbered: list[tuple[int, Row]], path: Path) -> int:
    """Completions of one group. The rows of a group follow each other, samples in order."""
    size = 0
    for group, members in groupby(numbered, key=lambda numbered_row: numbered_row[1]["group"]):
        rows = list(members)
        size = size or len(rows)
        samples = [row["sample"] for _, row in rows]
        refuse(
            samples != list(range(size)) or size < 2,
            f"{path} line {rows[0][0]}: group {group} has samples {samples} instead of those from 0 to"
            f" {max(size, 2) - 1}: lines are missing or not in order",
        )
    return size


def _saved_tokens(row: Row, tokenizer: Any) -> tuple[list[int], bool]:
    """As many tokens as were sampled, and whether the text gives as many.

    The token that ended a completion is not part of its text, so it is put back.
    """
    length = row["length"]
    ids = _tokens(row["completion"], tokenizer)
    eos = None if tokenizer is None else tokenizer.eos_token_id
    if row["finish"] == "stop" and len(ids) == length - 1 and eos is not None:
        ids.append(eos)
    return (ids + [UNKNOWN_TOKEN] * length)[:length], len(ids) == length


def _status(row: Row, name: str) -> RewardStatus:
    if name in row.get("failed", ()):
        return RewardStatus.FAILED
    return RewardStatus.NOT_APPLICABLE if row["rewards"].get(name) is None else RewardStatus.SCORED


def _numbers(values: Iterable[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
