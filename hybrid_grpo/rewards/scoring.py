"""Scoring completions with the reward functions of a run, and adding up what they say.

What a function may be, and what it may return, is in functions.py; how it is called in pool.py. Completions are scored
while others are still being sampled: a function gets each one as soon as it is there, or as many at once as it asks
for, or all of a prompt.

A function that fails on a completion (raises, hangs, dies, returns what is no reward) leaves it without a reward: it
takes no part in its group. Where the number of failures is too high the caller ends the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hybrid_grpo.config import ScoringConfig
from hybrid_grpo.config.errors import RunStopped, UserError, did_you_mean
from hybrid_grpo.data.batch import Completion, Prompt, Scores
from hybrid_grpo.rewards.combining import combined
from hybrid_grpo.rewards.functions import INPUTS, Failure, Inputs, Reply, RewardCall, Value, failed
from hybrid_grpo.rewards.loading import Reward
from hybrid_grpo.rewards.models.reward import RewardModel, Shard
from hybrid_grpo.rewards.steps import TokenEnds, token_steps
from hybrid_grpo.rewards.workers.pool import Outcome, busy_seconds


class Rewards:
    """The reward functions of a run; their names differ.

    Args:
        rewards: the functions.
        scoring: settings common to all; not given: the defaults.
        tokenizer: of the policy, which says at which tokens the steps of a text end; not given: they are one step.
    """

    def __init__(self, rewards: Sequence[Reward], scoring: ScoringConfig | None = None, tokenizer: Any = None) -> None:
        self._rewards = list(rewards)
        self._scoring = scoring or ScoringConfig()
        self._token_ends = None if tokenizer is None else TokenEnds(tokenizer)
        self._told: set[tuple[str, str]] = set()

    @property
    def names(self) -> list[str]:
        """Names of the functions, in the order of the configuration."""
        return [reward.name for reward in self._rewards]

    @property
    def models(self) -> list[RewardModel]:
        """Those that functions hold in this process."""
        return list({id(reward.model): reward.model for reward in self._rewards if reward.model is not None}.values())

    def load_models(self, shard: Shard | None = None) -> None:
        """Load the models that functions hold, which else are loaded by their first call. Collective.

        Args:
            shard: makes shards of a model; not given: none is sharded.

        Raises:
            UserError: one does not load.
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
            UserError: a column has the name of an input or of a fixed argument, or one that is needed is not there.
        """
        for name in INPUTS:
            if name in columns:
                raise UserError(
                    f"data: column {name} has the name under which rewards are given {name} of the rollout: rename it"
                )
        for reward in self._rewards:
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
        """Names of the columns that all prompts have: those that functions are given.

        Raises:
            UserError: see `check_columns`.
        """
        if not prompts:
            return []
        columns = [name for name in prompts[0].columns if all(name in prompt.columns for prompt in prompts)]
        self.check_columns(columns)
        return columns

    def stream(self, prompts: list[Prompt], num_generations: int, step: int = 0) -> Stream:
        """The scores of completions that are still to come; see `Stream`."""
        columns = self.common_columns(prompts)
        return Stream(
            self._rewards,
            prompts,
            num_generations,
            columns,
            step,
            self._scoring.max_wait_s,
            self._token_ends,
            self._tell,
        )

    def refuse_failures(self, failures: dict[str, int], rows: int) -> None:
        """Stop where a function failed on too many completions.

        Args:
            failures: completions that each function failed on, over all ranks.
            rows: completions over all ranks.

        Raises:
            RunStopped: on all ranks alike.
        """
        limit = self._scoring.max_failed_frac
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
        """Score completions that are all there.

        Args:
            prompts: [B], the prompt of every row.
            completions: [B]
            num_generations: rows that are one group, for functions that look at a whole one.
            step: of the run.

        Raises:
            UserError: see `check_columns`.
        """
        with self.stream(prompts[::num_generations], num_generations, step) as stream:
            for row, completion in enumerate(completions):
                stream.add(row // num_generations, row % num_generations, completion)
            return stream.scores()

    def _tell(self, name: str, failure: Failure) -> None:
        """The first failure of each kind of a function is shown."""
        if (name, failure.kind) not in self._told:
            self._told.add((name, failure.kind))
            print(
                f"rewards: {name} {failure.message}. The completion is left without a reward, and counted as failed\n"
                f"{failure.traceback}",
                file=sys.stderr,
                flush=True,
            )


class _Batches:
    """Which rows are given to a function at once."""

    def __init__(self, size: int, num_generations: int | None) -> None:
        self._size = size
        self._num_generations = num_generations
        self._waiting: dict[int, list[int]] = {}

    def add(self, row: int) -> list[int]:
        """The rows to call the function with now that this one is there; most often none or this."""
        group = row // self._num_generations if self._num_generations else 0
        rows = self._waiting.setdefault(group, [])
        rows.append(row)
        return sorted(self._waiting.pop(group)) if len(rows) == self._size else []

    def rest(self) -> list[list[int]]:
        """What is left when all rows are there."""
        rest, self._waiting = self._waiting, {}
        return [sorted(rows) for rows in rest.values()]


@dataclass(frozen=True)
class _Call:
    rows: list[int]
    outcome: Future[Outcome]


class Stream:
    """The scores of one rollout in the making.

        with rewards.stream(prompts, num_generations) as stream:
            ...  # calls stream.add for every completion
            scores = stream.scores()

    Leaving the block early, by an exception, gives up the calls under way.

    Args:
        prompts: [P]; may be empty.
        num_generations: G
        columns: given to functions. Of all prompts, whatever a call's rows are.
        step: of the run.
        max_wait_s: after the last completion; what is not scored then has failed.
        token_ends: where the tokens of a text end; None where they do not matter.
        tell: is given the failures of functions.
    """

    def __init__(
        self,
        rewards: list[Reward],
        prompts: list[Prompt],
        num_generations: int,
        columns: list[str],
        step: int,
        max_wait_s: float,
        token_ends: TokenEnds | None,
        tell: Callable[[str, Failure], None],
    ) -> None:
        self._rewards = rewards
        self._together = [reward for reward in rewards if reward.together]
        self._one_by_one = [reward for reward in rewards if not reward.together]
        self._prompts = prompts
        self._num_generations = num_generations
        self._columns = columns
        self._step = step
        self._max_wait_s = max_wait_s
        self._token_ends = token_ends
        self._tell = tell
        self._completions: dict[int, Completion] = {}
        self._calls: dict[str, list[_Call]] = {reward.name: [] for reward in rewards}
        self._batches = {
            reward.name: _Batches(num_generations, num_generations)
            if reward.interface.batch_size == "group"
            else _Batches(reward.interface.batch_size, None)
            for reward in self._one_by_one
        }

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for calls in self._calls.values():
            for call in calls:
                call.outcome.cancel()

    def add(self, prompt: int, sample: int, completion: Completion) -> None:
        """Take completion `sample` of prompt `prompt`, decoded. Does not wait, and does not raise what functions do."""
        row = prompt * self._num_generations + sample
        assert row not in self._completions, f"completion {sample} of prompt {prompt} came twice"
        self._completions[row] = completion
        for reward in self._one_by_one:
            self._start(reward, self._batches[reward.name].add(row))

    def scores(self) -> Scores:
        """Wait for the functions, no longer than they may take; rows are in the order of prompts and samples.

        Collective where a function is, see `Reward.together`.
        """
        assert len(self._completions) == len(self._prompts) * self._num_generations, "a completion is missing"
        for reward in self._one_by_one:
            for rows in self._batches[reward.name].rest():
                self._start(reward, rows)
        for reward in self._together:
            self._start(reward, list(range(len(self._completions))))
        until_s = time.perf_counter() + self._max_wait_s
        replies = {reward.name: self._reply(reward.name, until_s) for reward in self._rewards}
        return combined(self._rewards, replies, self._lengths, self._num_generations)

    @property
    def seconds(self) -> float:
        """Seconds in which functions were at work, of calls that are done."""
        done = (call.outcome for calls in self._calls.values() for call in calls)
        return busy_seconds(outcome.result() for outcome in done if outcome.done() and not outcome.cancelled())

    @property
    def _lengths(self) -> list[int]:
        return [len(self._completions[row].token_ids) for row in range(len(self._completions))]

    def _start(self, reward: Reward, rows: list[int]) -> None:
        if rows or reward.together:
            self._calls[reward.name].append(_Call(rows, reward.caller.start(self._call(reward, rows))))

    def _call(self, reward: Reward, rows: list[int]) -> RewardCall:
        prompts = [self._prompts[row // self._num_generations] for row in rows]
        completions = [self._completions[row] for row in rows]
        inputs: Inputs = {}
        # Copies of what the data set and the rollout hold: a function may change what it is given.
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
        """What the function said of all rows, if it said it by then; steps by their ends in tokens."""
        rows = len(self._completions)
        values: list[Value] = [None] * rows
        failures: list[Failure | None] = [None] * rows
        extra: dict[str, list[object]] = {}
        for call in self._calls[name]:
            reply = self._wait(call, until_s)
            for place, row in enumerate(call.rows):
                values[row], failures[row] = self._in_tokens(reply.values[place], reply.failures[place], row)
                for column, stored in reply.extra.items():
                    extra.setdefault(column, [None] * rows)[row] = stored[place]
        for failure in failures:
            if failure is not None:
                self._tell(name, failure)
        return Reply(values, failures, extra)

    def _in_tokens(self, value: Value, failure: Failure | None, row: int) -> tuple[Value, Failure | None]:
        if not isinstance(value, list) or not value or not isinstance(value[0][0], str):
            return value, failure
        try:
            return token_steps(value, self._completions[row], self._token_ends), None
        except ValueError as error:
            return None, Failure("invalid", f"returned pieces that are not those of the text: {error}")

    def _wait(self, call: _Call, until_s: float) -> Reply:
        try:
            return call.outcome.result(max(0.0, until_s - time.perf_counter())).reply
        except FutureTimeout:
            call.outcome.cancel()
            why = f"was not done scoring.max_wait_s, {self._max_wait_s:g} s, after the last completion"
            return failed(Failure("timeout", why), len(call.rows))
