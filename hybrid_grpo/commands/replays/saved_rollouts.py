"""Reuses rollouts that a run saved with their tokens, instead of sampling and scoring them again."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Scores
from hybrid_grpo.distributed.ranks import rank
from hybrid_grpo.generation import Journal, OnFinish, Request, Stats, complete_rest, stream_key
from hybrid_grpo.model.support import SamplingMask
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.records.tokens import SUPPORT, read_tokens
from hybrid_grpo.rewards.scorer import Rewards, Stream

Key = tuple[int, int, int]
"""Identifies a completion of a step, whatever the ranks: its prompt's row in the source, the epoch, and the sample."""
SavedRow = dict[str, Any]
"""A row of the token file; its entry `line` is the completion's line in the text file."""


class SavedRollouts:
    """Reads the completions in the folder `rollouts/` of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._step, self._rows = 0, dict[Key, SavedRow]()

    def has(self, step: int) -> bool:
        """Return whether the tokens of a step were saved."""
        return self._files(step)[0].is_file()

    def rows(self, step: int) -> dict[Key, SavedRow]:
        """Return the saved completions of a step, by their keys. Raise UserError if they cannot be read."""
        if step != self._step:
            tokens, lines = self._files(step)
            rows, texts = read_tokens(tokens), read_jsonl(lines)
            refuse(len(rows) != len(texts), f"{tokens} and {lines} do not have the same completions: remove both")
            self._step = step
            self._rows = {key_of(row): {**row, "line": line} for row, line in zip(rows, texts, strict=True)}
        return self._rows

    def _files(self, step: int) -> tuple[Path, Path]:
        name = f"step_{step:06d}"
        return self.folder / f"{name}.parquet", self.folder / f"{name}.jsonl"


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the key of the completion to which a row of a token file belongs."""
    return row["prompt_id"], row["epoch"], row["sample"]


class SavedCompletions(Journal):
    """Returns the completions that a run saved, and samples missing ones. Nothing is written.

    `seed` is the seed of that run, which determines its random streams.
    """

    def __init__(self, saved: SavedRollouts, seed: int) -> None:
        super().__init__(saved.folder, rank())
        self._saved, self._seed = saved, seed

    def complete(
        self,
        step: int,
        requests: list[Request],
        on_finish: OnFinish | None,
        sample: Any,
        given: Mapping[int, Completion] | None = None,
        resumed_from: Mapping[int, Completion] | None = None,
    ) -> tuple[list[list[Completion]], Stats]:
        """See `Journal.complete`."""
        known = {
            stream_key(self._seed, step, epoch, prompt, number): _completion(row)
            for (prompt, epoch, number), row in self._saved.rows(step).items()
            if row["writer"] is None and not _shows(row)
        }
        return complete_rest(requests, {**known, **(given or {})}, on_finish, sample, resumed_from=resumed_from)


def _shows(row: SavedRow) -> bool:
    """Whether answers in a completion showed pictures, which are not saved whole."""
    return any(token < 0 for part in row["given"] for token in part["ids"])


def _completion(row: SavedRow) -> Completion:
    line, observations = row["line"], tuple((part["before"], part["ids"]) for part in row["given"])
    ids, messages = row.get(SUPPORT), tuple(line.get("messages", ()))
    sidecars = (SamplingMask.of([np.array(of_token) for of_token in ids]),) if ids else ()
    return Completion(
        row["token_ids"], row["logp"], row["finish"], line["completion"], observations, messages, sidecars=sidecars
    )


class SavedRewards(Rewards):
    """Returns the rewards that a run saved, without calling the reward functions."""

    def __init__(self, rewards: Rewards, saved: SavedRollouts) -> None:
        super().__init__(rewards.functions, rewards.scoring)
        self.inputs, self._saved = rewards.inputs, saved

    def stream(self, prompts: list[Prompt], num_generations: int, step: int = 0) -> Stream:
        """See `Rewards.stream`. Raises UserError for a completion that was not saved."""
        found = self._saved.rows(step)
        keys = [(prompt.id, prompt.epoch, k) for prompt in prompts for k in range(num_generations)]
        for prompt, _, sample in (key for key in keys if key not in found):
            raise UserError(
                f"replay.rewards saved: the run did not save sample {sample} of prompt {prompt} in step {step}: set"
                " replay.rewards to again"
            )
        return _SavedStream(self, prompts, num_generations, step, [found[key]["line"] for key in keys])


class _SavedStream(Stream):
    def __init__(
        self, rewards: Rewards, prompts: list[Prompt], num_generations: int, step: int, lines: list[dict[str, Any]]
    ) -> None:
        super().__init__(rewards, prompts, num_generations, step)
        self._lines, self._names = lines, rewards.names

    def add(self, prompt: int, sample: int, completion: Completion) -> None:
        """Do nothing, since no reward function is called."""

    def scores(self, gives_up: Callable[[], bool] = lambda: False, chosen: Sequence[int] | None = None) -> Scores:
        """Return the saved scores."""
        reward_B = _numbers([line["reward"] for line in self._lines])
        scores_steps = any("steps" in line for line in self._lines)
        steps = [[(end, reward) for end, reward in line.get("steps", ())] for line in self._lines]
        of_steps_B = _numbers([sum(reward for _, reward in of_row) for of_row in steps])
        return Scores(
            reward_B,
            {name: _numbers([line["rewards"][name] for line in self._lines]) for name in self._names},
            {
                name: torch.tensor([_status(line, name) for line in self._lines], dtype=torch.int8)
                for name in self._names
            },
            steps if scores_steps else None,
            reward_B - of_steps_B if scores_steps else None,
        )


def _numbers(values: list[float | None]) -> torch.Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def _status(line: dict[str, Any], name: str) -> RewardStatus:
    if name in line["failed"]:
        return RewardStatus.FAILED
    return RewardStatus.NOT_APPLICABLE if line["rewards"][name] is None else RewardStatus.SCORED
