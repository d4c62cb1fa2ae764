"""Scoring completions with the reward functions of a run, and adding up their rewards.

functions.py says what a function may be and return, workers/ how it is called. Completions are scored while others are
still being sampled: a function gets each one as soon as it is finished, or as many at once as it asks for, or all
completions of a prompt.

A completion on which a function fails (it raises, hangs, dies, or returns something that is no reward) has no reward
and takes no part in its group. Where too many fail, the caller ends the run.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_grpo.config import ScoringConfig
from hybrid_grpo.config.errors import RunStopped, UserError, did_you_mean
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Scores
from hybrid_grpo.rewards.functions import INPUTS, Failure, Inputs, Reply, RewardCall, Value, failed
from hybrid_grpo.rewards.loading import Reward
from hybrid_grpo.rewards.models.reward import RewardModel, Shard
from hybrid_grpo.rewards.steps import TokenEnds, token_steps
from hybrid_grpo.rewards.workers.pool import Outcome, busy_seconds


class Rewards:
    """The reward functions of a run; their names differ.

    Args:
        rewards: the functions.
        scoring: settings common to all functions. Default: those of `ScoringConfig`.
        tokenizer: the policy's, to find at which tokens the steps of a text end. Default: all end with the completion.
    """

    def __init__(self, rewards: Sequence[Reward], scoring: ScoringConfig | None = None, tokenizer: Any = None) -> None:
        self.functions = list(rewards)
        self.scoring = scoring or ScoringConfig()
        self.token_ends = None if tokenizer is None else TokenEnds(tokenizer)
        self._told: set[tuple[str, str]] = set()

    @property
    def names(self) -> list[str]:
        """Names of the functions, in the order of the configuration."""
        return [reward.name for reward in self.functions]

    @property
    def models(self) -> list[RewardModel]:
        """Models that functions hold in this process, each once."""
        return list({id(reward.model): reward.model for reward in self.functions if reward.model is not None}.values())

    def load_models(self, shard: Shard | None = None) -> None:
        """Load the models that functions hold, which otherwise happens in their first call. Collective.

        Args:
            shard: shards a model over the ranks. Default: no model is sharded.

        Raises:
            UserError: a model does not load.
        """
        for model in self.models:
            try:
                model.load(shard)
            except ValueError as error:
                raise UserError(f"rewards: reward_model: {error}") from error

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse a data set whose columns the functions cannot be called with.

        Args:
            columns: names of the columns beside the prompt.

        Raises:
            UserError: a column has the name of an input or of a fixed argument, or a needed column is missing.
        """
        for name in INPUTS:
            if name in columns:
                raise UserError(
                    f"data: column {name} has the name under which rewards are given {name} of the rollout: rename it"
                )
        for reward in self.functions:
            for name in columns:
                if name in reward.kwargs and reward.interface.accepts(name):
                    raise UserError(
                        f"rewards: {reward.name} has {name} both in kwargs and as a column of the data: rename one"
                    )
            for name in reward.interface.required:
                if name not in columns and name not in INPUTS and reward.interface.instead.get(name) not in columns:
                    raise UserError(
                        f"rewards: {reward.name} needs {name}, which is neither a column of the data nor in its kwargs:"
                        f" {did_you_mean(name, columns)}"
                    )

    def common_columns(self, prompts: list[Prompt]) -> list[str]:
        """Names of the columns that all prompts have; only these are given to functions.

        Raises:
            UserError: see `check_columns`.
        """
        if not prompts:
            return []
        columns = [name for name in prompts[0].columns if all(name in prompt.columns for prompt in prompts)]
        self.check_columns(columns)
        return columns

    def stream(self, prompts: list[Prompt], num_generations: int, step: int = 0) -> Stream:
        """Score completions of these prompts as they come in; see `Stream`."""
        return Stream(self, prompts, num_generations, step)

    def refuse_failures(self, failures: dict[str, int], rows: int) -> None:
        """Stop the run where a function failed on too many completions.

        Args:
            failures: number of completions that each function failed on, over all ranks.
            rows: number of completions over all ranks.

        Raises:
            RunStopped: on all ranks alike.
        """
        limit = self.scoring.max_failed_frac
        for name, count in failures.items():
            if count > limit * rows:
                raise RunStopped(
                    f"rewards: {name} failed on {count} of {rows} completions, more than scoring.max_failed_frac"
                    f" {limit:g}: the first failures are printed above; mend the function and go on with"
                    " --run.resume auto"
                )

    def score(
        self, prompts: list[Prompt], completions: list[Completion], num_generations: int = 1, step: int = 0
    ) -> Scores:
        """Score completions that have all been sampled.

        Args:
            prompts: [B], the prompt of every row.
            completions: [B]
            num_generations: number of rows of a group, for functions that look at a whole group.
            step: step of the run.

        Raises:
            UserError: see `check_columns`.
        """
        with self.stream(prompts[::num_generations], num_generations, step) as stream:
            for row, completion in enumerate(completions):
                stream.add(row // num_generations, row % num_generations, completion)
            return stream.scores()

    def tell(self, name: str, failure: Failure) -> None:
        """Print the first failure of each kind of a function."""
        if (name, failure.kind) not in self._told:
            self._told.add((name, failure.kind))
            print(
                f"rewards: {name} {failure.message}. The completion is left without a reward, and counted as failed\n"
                f"{failure.traceback}",
                file=sys.stderr,
                flush=True,
            )


@dataclass(frozen=True)
class _Call:
    rows: list[int]
    outcome: Future[Outcome]


class Stream:
    """The scores of a rollout whose completions come in one by one.

        with rewards.stream(prompts, num_generations) as stream:
            ...  # call stream.add for every completion
            scores = stream.scores()

    Leaving the block early, by an exception, cancels the calls under way.

    Args:
        rewards: the functions and their settings.
        prompts: [P]; may be empty.
        num_generations: G
        step: step of the run.
    """

    def __init__(self, rewards: Rewards, prompts: list[Prompt], num_generations: int, step: int) -> None:
        self._rewards = rewards.functions
        self._max_wait_s = rewards.scoring.max_wait_s
        self._token_ends = rewards.token_ends
        self._tell = rewards.tell
        self._prompts = prompts
        self._columns = rewards.common_columns(prompts)
        self._num_generations = num_generations
        self._step = step
        self._completions: dict[int, Completion] = {}
        self._finished: Counter[int] = Counter()  # completions of each prompt
        self._waiting: dict[str, list[int]] = {reward.name: [] for reward in self._rewards}  # rows of the next call
        self._calls: dict[str, list[_Call]] = {reward.name: [] for reward in self._rewards}

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        for calls in self._calls.values():
            for call in calls:
                call.outcome.cancel()

    def add(self, prompt: int, sample: int, completion: Completion) -> None:
        """Take completion `sample` of prompt `prompt`. Never waits, and never raises what functions raise."""
        first = prompt * self._num_generations
        row = first + sample
        assert row not in self._completions, f"completion {sample} of prompt {prompt} came twice"
        self._completions[row] = completion
        self._finished[prompt] += 1
        for reward in self._rewards:
            if reward.together:
                continue
            if reward.interface.batch_size == "group":
                if self._finished[prompt] == self._num_generations:
                    self._start(reward, range(first, first + self._num_generations))
            else:
                self._waiting[reward.name].append(row)
                if len(self._waiting[reward.name]) == reward.interface.batch_size:
                    self._start_waiting(reward)

    def scores(self) -> Scores:
        """Wait for the functions, but no longer than `max_wait_s`; rows are in the order of prompts and samples.

        Collective where a function is, see `Reward.together`.
        """
        assert len(self._completions) == len(self._prompts) * self._num_generations, "a completion is missing"
        for reward in self._rewards:
            self._start_waiting(reward)
        for reward in self._rewards:
            if reward.together:
                self._start(reward, range(len(self._completions)))
        until_s = time.perf_counter() + self._max_wait_s
        replies = {reward.name: self._reply(reward.name, until_s) for reward in self._rewards}
        lengths = [len(self._completions[row].token_ids) for row in range(len(self._completions))]
        return combined(self._rewards, replies, lengths, self._num_generations)

    @property
    def seconds(self) -> float:
        """Seconds in which at least one of the finished calls was at work."""
        done = (call.outcome for calls in self._calls.values() for call in calls)
        return busy_seconds(outcome.result() for outcome in done if outcome.done() and not outcome.cancelled())

    def _start_waiting(self, reward: Reward) -> None:
        rows, self._waiting[reward.name] = self._waiting[reward.name], []
        if rows:
            self._start(reward, sorted(rows))

    def _start(self, reward: Reward, rows: Sequence[int]) -> None:
        self._calls[reward.name].append(_Call(list(rows), reward.caller(self._request(reward, rows))))

    def _request(self, reward: Reward, rows: Sequence[int]) -> RewardCall:
        prompts = [self._prompts[row // self._num_generations] for row in rows]
        completions = [self._completions[row] for row in rows]
        inputs: Inputs = {}
        # A function may change what it is given, so it gets copies.
        if reward.interface.accepts("prompts"):
            inputs["prompts"] = [p.text if isinstance(p.text, str) else [dict(m) for m in p.text] for p in prompts]
        if reward.interface.accepts("completions"):
            inputs["completions"] = [
                c.text if isinstance(p.text, str) else [{"role": "assistant", "content": c.text}]
                for p, c in zip(prompts, completions, strict=True)
            ]
        if reward.interface.accepts("completion_ids"):
            inputs["completion_ids"] = [list(completion.token_ids) for completion in completions]
        for name in filter(reward.interface.accepts, self._columns):
            inputs[name] = [prompt.columns[name] for prompt in prompts]
        return RewardCall(inputs, [len(completion.token_ids) for completion in completions], self._step)

    def _reply(self, name: str, until_s: float) -> Reply:
        """The replies of a function for all rows, as far as they come in time; steps by their ends in tokens."""
        rows = len(self._completions)
        values: list[Value] = [None] * rows
        failures: list[Failure | None] = [None] * rows
        extra: dict[str, list[object]] = {}
        for call in self._calls[name]:
            reply = self._wait(call, until_s)
            for index, row in enumerate(call.rows):
                values[row], failures[row] = self._in_tokens(reply.values[index], reply.failures[index], row)
                for column, stored in reply.extra.items():
                    extra.setdefault(column, [None] * rows)[row] = stored[index]
        for failure in filter(None, failures):
            self._tell(name, failure)
        return Reply(values, failures, extra)

    def _in_tokens(self, value: Value, failure: Failure | None, row: int) -> tuple[Value, Failure | None]:
        if not isinstance(value, list) or not value or not isinstance(value[0][0], str):
            return value, failure
        try:
            return token_steps(value, self._completions[row], self._token_ends), None
        except ValueError as error:
            return None, Failure("invalid", f"returned steps that do not make up the text: {error}")

    def _wait(self, call: _Call, until_s: float) -> Reply:
        try:
            return call.outcome.result(max(0.0, until_s - time.perf_counter())).reply
        except FutureTimeout:
            call.outcome.cancel()
            why = f"was not done scoring.max_wait_s, {self._max_wait_s:g} s, after the last completion"
            return failed(Failure("timeout", why), len(call.rows))


def combined(rewards: Sequence[Reward], replies: dict[str, Reply], lengths: list[int], num_generations: int) -> Scores:
    """The weighted sum of what functions returned.

    A function that does not apply to a row adds nothing to its reward; where none applies the reward is 0.0, as in TRL.
    A row on which a function failed has no reward. In a group in which a function scores steps, a number that it
    returns is the reward of a single step, the whole completion.

    Args:
        replies: by name; steps by their ends in tokens.
        lengths: [B], tokens of the completions.
        num_generations: G
    """
    values = {name: torch.tensor(list(map(_sum, reply.values)), dtype=torch.float64) for name, reply in replies.items()}
    status = {
        name: torch.tensor([_status(v, f) for v, f in zip(reply.values, reply.failures, strict=True)], dtype=torch.int8)
        for name, reply in replies.items()
    }
    failed_B = torch.stack([status_B >= RewardStatus.FAILED for status_B in status.values()]).any(0)

    def total(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts).nansum(dim=0).masked_fill(failed_B, math.nan)

    steps: list[dict[int, float]] = [{} for _ in lengths]  # by their ends, weighted
    by_steps = {reward.name: _by_steps(replies[reward.name].values, num_generations) for reward in rewards}
    for reward in rewards:
        for row, value in enumerate(replies[reward.name].values):
            if by_steps[reward.name][row] and value is not None and not failed_B[row]:
                for end, step in value if isinstance(value, list) else [(lengths[row], value)]:
                    steps[row][end] = steps[row].get(end, 0.0) + reward.weight * step  # type: ignore[index,arg-type]
    whole = [reward.weight * values[reward.name].masked_fill(by_steps[reward.name], 0.0) for reward in rewards]
    scores_steps = any(bool(by_steps_B.any()) for by_steps_B in by_steps.values())
    return Scores(
        total([reward.weight * values[reward.name] for reward in rewards]),
        values,
        status,
        [sorted(row.items()) for row in steps] if scores_steps else None,
        total(whole) if scores_steps else None,
        {f"{name}/{column}": stored for name, reply in replies.items() for column, stored in reply.extra.items()},
        {
            name: [failure.message if failure else None for failure in reply.failures]
            for name, reply in replies.items()
            if any(reply.failures)
        },
    )


def _sum(value: Value) -> float:
    if value is None:
        return math.nan
    return sum(reward for _, reward in value) if isinstance(value, list) else value


def _status(value: Value, failure: Failure | None) -> int:
    if failure is None:
        return RewardStatus.SCORED if value is not None else RewardStatus.NOT_APPLICABLE
    return RewardStatus.TIMED_OUT if failure.kind == "timeout" else RewardStatus.FAILED


def _by_steps(values: list[Value], num_generations: int) -> torch.Tensor:
    """bool [B], True in groups for which a function returned the steps of at least one row."""
    in_steps = torch.tensor([isinstance(value, list) for value in values], dtype=torch.bool)
    return in_steps.view(-1, num_generations).any(1).repeat_interleave(num_generations)
