"""Rollouts that a run has saved, read back into the records that its steps were made of.

A line of rollouts/step_NNNNNN.jsonl has the text of a completion and the number of its tokens, not the tokens: they
would double the file, and few reward functions look at them. A tokenizer, where one is given, makes them again from the
text; without one every token is `UNKNOWN_TOKEN`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Rollout, Scores
from hybrid_grpo.data.sources import Row, json_rows

UNKNOWN_TOKEN = -1
"""Stands for a token of which nothing but its place is known."""


@dataclass(frozen=True)
class SavedStep:
    """One step as it was, of all ranks."""

    step: int
    rollout: Rollout
    """Without log-probabilities."""
    scores: Scores
    """Without rewards of steps: their sums alone are saved."""
    advantages_B: Tensor
    """float32, mean over the tokens of a completion."""
    retokenized: int
    """Completions whose text, made into tokens again, has as many as were sampled."""


def saved_files(run: Path) -> dict[int, Path]:
    """The file of every saved step of a run, by step, rising."""
    files = {path.stem.partition("_")[2]: path for path in (run / "rollouts").glob("step_*.jsonl")}
    return {int(step): files[step] for step in sorted(filter(str.isdigit, files), key=int)}


def read_step(path: Path, tokenizer: Any = None) -> SavedStep:
    """The step of one file.

    Raises:
        UserError: the file cannot be read, a line is none of a rollout, or a group is not whole.
    """
    try:
        with path.open("rb") as lines:
            numbered = list(json_rows(lines, str(path)))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if not numbered:
        raise UserError(f"{path} is empty: remove it")
    for number, row in numbered:
        _check_line(row, f"{path} line {number}")
    size = _group_size(numbered, path)
    rows = [row for _, row in numbered]
    tokens = [_token_ids(row, tokenizer) for row in rows]
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
    return SavedStep(
        step=rows[0]["step"],
        rollout=Rollout(prompts, completions, size),
        scores=scores,
        advantages_B=_numbers(row["advantage"] for row in rows).float(),
        retokenized=sum(whole for _, whole in tokens),
    )


_FIELDS: dict[str, tuple[type, ...]] = {
    "step": (int,), "group": (int,), "sample": (int,), "prompt_id": (int,), "prompt": (str, list),
    "completion": (str,), "reward": (int, float, type(None)), "rewards": (dict,),
    "advantage": (int, float, type(None)), "length": (int,), "finish": (str,), "columns": (dict,),
}  # fmt: skip
"""What a line must have; numbers that JSON cannot hold are null."""


def _check_line(row: Row, where: str) -> None:
    for name, kinds in _FIELDS.items():
        if name not in row or not isinstance(row[name], kinds):
            what = f"has {name} {row[name]!r:.40}" if name in row else f"has no {name}"
            raise UserError(f"{where} {what}: it is not as a run writes it")


def _group_size(numbered: list[tuple[int, Row]], path: Path) -> int:
    """G; groups are rows that follow each other, samples in order."""
    size = 0
    for group, members in groupby(numbered, key=lambda numbered_row: numbered_row[1]["group"]):
        rows = list(members)
        size = size or len(rows)
        if len(rows) != size or [row["sample"] for _, row in rows] != list(range(size)) or size < 2:
            raise UserError(
                f"{path} line {rows[0][0]}: group {group} has samples {[row['sample'] for _, row in rows]}, and not"
                f" those from 0 to {max(size, 2) - 1}: lines are missing or not in order"
            )
    return size


def _token_ids(row: Row, tokenizer: Any) -> tuple[list[int], bool]:
    """As many as were sampled, and whether the text has as many: the token that ended it is not part of the text."""
    length = row["length"]
    if tokenizer is None:
        return [UNKNOWN_TOKEN] * length, False
    ids: list[int] = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    if row["finish"] == "stop" and len(ids) == length - 1 and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return (ids + [UNKNOWN_TOKEN] * length)[:length], len(ids) == length


def _status(row: Row, name: str) -> RewardStatus:
    if name in row.get("failed", ()):
        return RewardStatus.FAILED
    return RewardStatus.NOT_APPLICABLE if row["rewards"].get(name) is None else RewardStatus.SCORED


def _numbers(values: Iterable[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
