"""Calling the reward functions on a rollout, and adding up what they say.

The convention is TRL's, so that its functions run unchanged:

    f(prompts, completions, completion_ids=..., **dataset_columns, **kwargs) -> list[float | None]

Every input is a list with one element per row; everything is given by name. A function without **kwargs is given
only what its signature names. Chat prompts are lists of messages, and so are their completions (one message of the
assistant). None means that the function does not apply to the row. `async def` functions run at the same time, in
one event loop that lives as long as the rewards do.

Process rewards: in place of a number a function may return the rewards of a completion's steps, a list of pairs
(end, reward), where `end` counts the completion's tokens up to the end of the step. In a group in which a function
scores steps, a number of it is the reward of one step that is the whole completion.

In training a call gets the rows of one group, all completions of one prompt, as soon as they are there (see
streaming.py; TRL hands over the whole batch of a device); in evaluation it gets all rows.

Functions run in threads of this process, beside the one that samples. One that hangs is waited for. Handlers of
signals, time limits by SIGALRM among them, can only be set in the main thread: such a function fails.
"""

from __future__ import annotations

import math
import reprlib
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from hybrid_grpo.data.batch import Completion, Prompt, Scores, Step
from hybrid_grpo.errors import UserError, did_you_mean
from hybrid_grpo.rewards.calling import Background, Inputs, Pending
from hybrid_grpo.rewards.loading import INPUTS, Reward, describe


@dataclass(frozen=True)
class Call:
    """All functions at work on rows that follow each other."""

    prompts: list[Prompt]
    """The prompt of every row."""
    inputs: Inputs
    lengths: list[int]
    """Tokens of the completion of every row."""
    first_row: int
    """Where the rows begin in the rollout: errors name a row of that."""
    pending: Pending


class Rewards:
    """The reward functions of a run; their names differ."""

    def __init__(self, rewards: list[Reward]) -> None:
        self._rewards = rewards
        self._background = Background()
        self._warned = False

    @property
    def names(self) -> list[str]:
        """Names of the functions, in the order of the configuration."""
        return [reward.name for reward in self._rewards]

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse a data set whose columns the functions cannot be called with.

        Args:
            columns: names of the columns beside the prompt.

        Raises:
            UserError: a column has the name of an input or of a fixed argument, or one that is needed is not there.
        """
        for name in INPUTS:
            if name in columns:
                raise UserError(
                    f"data: column {name} has the name under which rewards are given {name} of the rollout: rename it"
                )
        for reward in self._rewards:
            for name in columns:
                if name in reward.kwargs:
                    raise UserError(
                        f"rewards: {reward.name} has {name} both in kwargs and as a column of the data: rename one"
                    )
            for name in sorted(reward.required.difference(columns, INPUTS)):
                raise UserError(
                    f"rewards: {reward.name} needs {name}, which is neither a column of the data nor in its kwargs:"
                    f" {did_you_mean(name, columns)}"
                )

    def common_columns(self, prompts: list[Prompt]) -> list[str]:
        """Names of the columns that all prompts have: those that functions are given.

        Raises:
            UserError: see `check_columns`.
        """
        if not prompts:
            return []
        columns = [name for name in prompts[0].columns if all(name in prompt.columns for prompt in prompts)]
        self.check_columns(columns)
        return columns

    def score(self, prompts: list[Prompt], completions: list[Completion]) -> Scores:
        """Call every function with all rows, and add up their rewards with their weights.

        A function that does not apply to a row adds nothing to its reward; where none applies the reward is 0.0,
        as in TRL, with one warning per run. Such a prompt teaches nothing as long as none applies to any of its
        completions; `by_function` has NaN there, so that metrics need not count it as 0.

        A function that fails is called again with one row at a time, to name the first row that it fails on.

        Args:
            prompts: [B], the prompt of every row.
            completions: [B]

        Raises:
            UserError: a function raised, or returned anything but one finite number, list of steps or None per row;
                the exception of the function is the cause. Or see `check_columns`.
        """
        columns = self.common_columns(prompts)
        return self.finish([self.start(prompts, completions, columns, first_row=0)] if prompts else [])

    def start(
        self, prompts: list[Prompt], completions: list[Completion], columns: list[str], *, first_row: int
    ) -> Call:
        """Begin to call every function with the rows from `first_row` on; `finish` says what comes of it."""
        inputs = _inputs(prompts, completions) | {name: [p.columns[name] for p in prompts] for name in columns}
        lengths = [len(completion.token_ids) for completion in completions]
        return Call(prompts, inputs, lengths, first_row, self._background.call(self._rewards, inputs))

    def finish(self, calls: list[Call]) -> Scores:
        """Wait for calls that make up a rollout, in the order of its rows: what `score` says of all rows at once.

        Raises:
            UserError: see `score`; of several faults the one of the first call.
        """
        numbers: dict[str, list[float]] = {name: [] for name in self.names}
        steps: dict[str, list[list[Step] | None]] = {name: [] for name in self.names}
        for call in calls:
            for reward, result in zip(self._rewards, call.pending.outcome().results, strict=True):
                result = result.tolist() if hasattr(result, "tolist") else result
                if _fault(reward, result, len(call.prompts)) is not None:
                    for other in calls:
                        other.pending.cancel()
                    self._refuse(reward, result, call)
                values = _values(reward, result, call)
                numbers[reward.name] += map(_outcome, values)
                steps[reward.name] += _steps(values, call.lengths)
        return self._sum(numbers, steps)

    def _sum(self, numbers: dict[str, list[float]], steps: dict[str, list[list[Step] | None]]) -> Scores:
        by_function = {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers.items()}
        weighted = [reward.weight * by_function[reward.name] for reward in self._rewards]
        reward_B = torch.stack(weighted).nansum(dim=0)
        unscored_B = torch.stack(weighted).isnan().all(dim=0)
        if unscored_B.any() and not self._warned:
            self._warned = True
            warnings.warn(
                f"rewards: no function applies to row {int(unscored_B.nonzero()[0])} ({int(unscored_B.sum())} of"
                f" {len(unscored_B)} rows): the reward is 0 there, and in later steps",
                stacklevel=4,
            )
        if all(row is None for rows in steps.values() for row in rows):
            return Scores(reward_B, by_function)
        whole = [
            reward.weight * by_function[reward.name].masked_fill(_scored(steps[reward.name]), 0.0)
            for reward in self._rewards
        ]
        weighted_steps = [
            [(end, reward.weight * value) for reward in self._rewards for end, value in steps[reward.name][row] or ()]
            for row in range(len(reward_B))
        ]
        return Scores(reward_B, by_function, list(map(_merged, weighted_steps)), torch.stack(whole).nansum(dim=0))

    def _refuse(self, reward: Reward, result: Any, call: Call) -> NoReturn:
        """Name the first row that the function fails on when called with it alone."""
        problem = f"rewards: {reward.name} {_fault(reward, result, len(call.prompts))}"
        for row in range(len(call.prompts)):
            inputs = {name: [values[row]] for name, values in call.inputs.items()}
            (alone,) = self._background.call([reward], inputs).outcome().results
            fault = _fault(reward, alone, 1)
            if fault is not None:
                again = "" if problem.endswith(fault) else f", which alone {fault}"
                raise UserError(f"{problem}; the first row at fault is {_row(row, call)}{again}") from _cause(alone)
        raise UserError(
            f"{problem}; called with one row at a time it does not fail: it must return one value per row"
        ) from _cause(result)


def _inputs(prompts: list[Prompt], completions: list[Completion]) -> Inputs:
    # Copies of what the data set and the rollout hold: a function may change what it is given.
    return {
        "prompts": [p.text if isinstance(p.text, str) else [dict(m) for m in p.text] for p in prompts],
        "completions": [
            c.text if isinstance(p.text, str) else [{"role": "assistant", "content": c.text}]
            for p, c in zip(prompts, completions, strict=True)
        ],
        "completion_ids": [list(completion.token_ids) for completion in completions],
    }


def _fault(reward: Reward, result: Any, rows: int) -> str | None:
    """What is wrong with a result as a whole; None if nothing is."""
    if isinstance(result, BaseException):
        code = getattr(reward.function, "__code__", None)
        return f"raised {describe(result, code.co_filename if code else None)}"
    if not isinstance(result, list | tuple):
        return f"returned a {type(result).__name__}, expected a list of {rows}"
    if len(result) != rows:
        return f"returned {len(result)} values, expected {rows}"
    return None


def _values(reward: Reward, values: list[Any], call: Call) -> list[float | list[Step]]:
    """The values as floats, NaN for None, or lists of steps."""
    checked: list[float | list[Step]] = []
    for row, value in enumerate(values):
        is_list = isinstance(value, list | tuple)
        known = _checked_steps(value, call.lengths[row]) if is_list else math.nan if value is None else _number(value)
        if known is None:
            steps = f", or (end, reward) pairs with ends rising within 1 to {call.lengths[row]}, the tokens it has"
            raise UserError(
                f"rewards: {reward.name} returned {reprlib.repr(value)} for {_row(row, call)}:"
                f" return a finite number, or None where it does not apply{steps if is_list else ''}"
            )
        checked.append(known)
    return checked


def _checked_steps(pairs: Any, length: int) -> list[Step] | None:
    """The steps of one completion; None if that is not what they are."""
    steps: list[Step] = []
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return None
        end, reward = pair[0], _number(pair[1])
        whole = hasattr(end, "__index__") and not isinstance(end, bool)
        if reward is None or not whole or not (steps[-1][0] if steps else 0) < int(end) <= length:
            return None
        steps.append((int(end), reward))
    return steps


def _outcome(value: float | list[Step]) -> float:
    return sum(reward for _, reward in value) if isinstance(value, list) else value


def _steps(values: list[float | list[Step]], lengths: list[int]) -> list[list[Step] | None]:
    """What one function says of the steps of each row of a call; None where it scores completions as a whole."""
    if not any(isinstance(value, list) for value in values):
        return [None] * len(values)
    return [
        value if isinstance(value, list) else [] if math.isnan(value) else [(length, value)]
        for value, length in zip(values, lengths, strict=True)
    ]


def _scored(steps: list[list[Step] | None]) -> Tensor:
    return torch.tensor([row is not None for row in steps])


def _merged(steps: list[Step]) -> list[Step]:
    """The steps of several functions as those of one: rewards with the same end are added up."""
    merged: dict[int, float] = {}
    for end, reward in steps:
        merged[end] = merged.get(end, 0.0) + reward
    return sorted(merged.items())


def _number(value: Any) -> float | None:
    # float() also reads text; a reward given as text is a mistake.
    try:
        number = float(value) if hasattr(value, "__float__") or hasattr(value, "__index__") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def _row(row: int, call: Call) -> str:
    return f"row {call.first_row + row} (prompt {call.prompts[row].id})"


def _cause(result: Any) -> BaseException | None:
    return result if isinstance(result, BaseException) else None
