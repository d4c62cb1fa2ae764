"""Scoring completions with the reward functions of a run, and adding up their rewards.

functions.py says what a function may be and return, workers/ how it is called. Completions are scored while others are
still being sampled: a function gets each one as soon as it is finished, or as many at once as it asks for, or all
completions of a prompt.

A completion on which a function fails (it raises, hangs, dies, or returns something that is not a reward) has no reward
and takes no part in its group. Where too many fail, the caller ends the run.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch

from hybrid_grpo.config import ScoringConfig
from hybrid_grpo.config.errors import RunStopped, UserError, did_you_mean
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Scores
from hybrid_grpo.model.ranks import all_reduce
from hybrid_grpo.rewards.functions import ENVIRONMENTS, INPUTS, Value
from hybrid_grpo.rewards.loading import Reward
from hybrid_grpo.rewards.models.reward_model import RewardModel, Shard
from hybrid_grpo.rewards.steps import TokenEnds, token_steps
from hybrid_grpo.workers.calls import Call, Failure, Inputs, Reply, failed
from hybrid_grpo.workers.pool import busy_seconds
from hybrid_grpo.workers.snapshots import Snapshot

EPISODES = "episodes/"
"""Input with what came of environments, for their own rewards; no column or parameter has such a name."""
_PATIENCE_S = 0.2
"""Between two looks at whether the run stops."""


class Rewards:
    """The reward functions of a run; their names differ.

    The `tokenizer` is the policy's, to find at which tokens the steps of a text end; without one all steps end with the
    completion. `environments` are the rewards that environments give, if there are any.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        scoring: ScoringConfig | None = None,
        tokenizer: Any = None,
        environments: Sequence[Reward] = (),
    ) -> None:
        self.functions = [*rewards, *environments]
        self.inputs: tuple[str, ...] = (*INPUTS, ENVIRONMENTS) if environments else INPUTS
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
        """Raise UserError where the functions cannot be called with these columns, those beside the prompt: one has the
        name of an input or of a fixed argument, or one that is needed is missing."""
        for name in self.inputs:
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
                if (
                    name not in columns
                    and name not in self.inputs
                    and reward.interface.instead.get(name) not in columns
                ):
                    raise UserError(
                        f"rewards: {reward.name} needs {name}, which is neither a column of the data nor in its kwargs:"
                        f" {did_you_mean(name, columns)}"
                    )

    def stream(self, prompts: list[Prompt], num_generations: int, step: int = 0) -> Stream:
        """Score completions of these prompts as they come in; see `Stream`."""
        return Stream(self, prompts, num_generations, step)

    def refuse_failures(self, scores: Scores, device: torch.device) -> None:
        """Raise RunStopped, on all ranks alike, where a function failed on too many completions of all ranks together.

        Collective: each rank gives the scores of its own completions, and the device on which counts are exchanged.
        """
        counts = [int((status_B >= RewardStatus.FAILED).sum()) for status_B in scores.status.values()]
        *failures, rows = all_reduce(torch.tensor([*counts, len(scores.reward_B)], device=device)).tolist()
        limit = self.scoring.max_failed_frac
        for name, count in zip(scores.status, failures, strict=True):
            if count > limit * rows:
                raise RunStopped(
                    f"rewards: {name} failed on {count} of {rows} completions, more than scoring.max_failed_frac"
                    f" {limit:g}: the first failures are printed above; mend the function and go on with"
                    " --run.resume auto"
                )

    def score(
        self, prompts: list[Prompt], completions: list[Completion], num_generations: int = 1, step: int = 0
    ) -> Scores:
        """Score completions that have all been sampled; raises UserError as `check_columns` does.

        Args:
            prompts: [B], the prompt of every row.
            completions: [B]
            num_generations: number of rows of a group, for functions that look at a whole group.
            step: step of the run.
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


class Stream:
    """The scores of a rollout whose completions come in one by one.

        with rewards.stream(prompts, num_generations) as stream:
            ...  # call stream.add for every completion
            scores = stream.scores()

    Leaving the block early, by an exception, cancels the calls under way. There may be no prompts.
    """

    def __init__(self, rewards: Rewards, prompts: list[Prompt], num_generations: int, step: int) -> None:
        self._rewards = rewards
        self._prompts = prompts
        self._num_generations = num_generations
        self._step = step
        first = prompts[0].columns if prompts else {}
        # Functions are given the columns that all prompts have.
        self._columns = [name for name in first if all(name in prompt.columns for prompt in prompts)]
        if prompts:
            rewards.check_columns(self._columns)
        self._completions: dict[int, Completion] = {}
        self._waiting: dict[tuple[str, int | None], list[int]] = defaultdict(list)
        """Rows of the next call, by function, and by prompt where a call takes a group."""
        self._calls: dict[str, list[tuple[list[int], Future[Reply]]]] = {name: [] for name in rewards.names}
        """Calls of each function: their rows, and the replies to come."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        for reply in self._replies():
            reply.cancel()

    def add(self, prompt: int, sample: int, completion: Completion) -> None:
        """Take completion `sample` of prompt `prompt`. Never waits, and never raises what functions raise."""
        row = prompt * self._num_generations + sample
        assert row not in self._completions, f"completion {sample} of prompt {prompt} came twice"
        self._completions[row] = completion
        for reward in self._rewards.functions:
            if not reward.applies(self._prompts[prompt]) or _lacks_environment(reward, completion):
                continue
            size = reward.interface.batch_size
            group, size = (prompt, self._num_generations) if size == "group" else (None, size)
            self._waiting[reward.name, group].append(row)
            if len(self._waiting[reward.name, group]) == size:
                self._start(reward, group)

    def scores(self, gives_up: Callable[[], bool] = lambda: False) -> Scores:
        """Wait for the functions, but no longer than `max_wait_s`, and only while `gives_up` says no; rows are in the
        order of prompts and samples.

        Collective where a function is, see `Interface.batch_size`.
        """
        assert len(self._completions) == len(self._prompts) * self._num_generations, "a completion is missing"
        functions = self._rewards.functions
        # Functions that all ranks call together come last: they return when they are done.
        for reward in sorted(functions, key=lambda reward: reward.interface.batch_size == "all"):
            if self._waiting[reward.name, None] or reward.interface.batch_size == "all":
                self._start(reward, None)
        until_s = time.perf_counter() + self._rewards.scoring.max_wait_s
        replies = {name: self._reply(name, until_s, gives_up) for name in self._rewards.names}
        lengths = [len(self._completions[row].token_ids) for row in range(len(self._completions))]
        return combined(functions, replies, lengths, self._num_generations)

    @property
    def seconds(self) -> float:
        """Seconds in which at least one of the finished calls was at work."""
        return busy_seconds(r.result() for r in self._replies() if r.done() and not r.cancelled())

    def _replies(self) -> list[Future[Reply]]:
        return [reply for calls in self._calls.values() for _, reply in calls]

    def _start(self, reward: Reward, group: int | None) -> None:
        """Call a function with the rows that wait for it."""
        rows = sorted(self._waiting.pop((reward.name, group)))
        prompts = [self._prompts[row // self._num_generations] for row in rows]
        completions = [self._completions[row] for row in rows]
        inputs: Inputs = {
            "prompts": [prompt.text for prompt in prompts],
            "completions": [
                c.text if isinstance(p.text, str) else list(c.messages) or [{"role": "assistant", "content": c.text}]
                for p, c in zip(prompts, completions, strict=True)
            ],
            "completion_ids": [completion.token_ids for completion in completions],
            **{name: [prompt.columns[name] for prompt in prompts] for name in self._columns},
        }
        if ENVIRONMENTS in self._rewards.inputs:
            states = [None if c.episode is None else c.episode.state for c in completions]
            inputs[ENVIRONMENTS] = [None if state is None else Snapshot(state) for state in states]
        accepted = {name: values for name, values in inputs.items() if reward.interface.accepts(name)}
        if EPISODES in (reward.interface.accepted or ()):
            accepted[EPISODES] = [completion.episode for completion in completions]
        call = Call(accepted, [len(completion.token_ids) for completion in completions], self._step)
        self._calls[reward.name].append((rows, reward.caller(call)))

    def _reply(self, name: str, until_s: float, gives_up: Callable[[], bool]) -> Reply:
        """The replies of a function for all rows, as far as they come in time; steps by their ends in tokens."""
        rows = len(self._completions)
        values: list[Value] = [None] * rows
        failures: list[Failure | None] = [None] * rows
        extra: dict[str, list[object]] = {}
        for call_rows, future in self._calls[name]:
            reply = self._wait(future, len(call_rows), until_s, gives_up)
            for index, row in enumerate(call_rows):
                values[row], failures[row] = self._in_tokens(reply.values[index], reply.failures[index], row)
                for column, stored in reply.extra.items():
                    extra.setdefault(column, [None] * rows)[row] = stored[index]
        for failure in filter(None, failures):
            self._rewards.tell(name, failure)
        return Reply(values, failures, extra)

    def _in_tokens(self, value: Value, failure: Failure | None, row: int) -> tuple[Value, Failure | None]:
        if not isinstance(value, list) or not value or not isinstance(value[0][0], str):
            return value, failure
        try:
            return token_steps(value, self._completions[row], self._rewards.token_ends), None
        except ValueError as error:
            return None, Failure("invalid", f"returned steps that do not make up the text: {error}")

    def _wait(self, reply: Future[Reply], rows: int, until_s: float, gives_up: Callable[[], bool]) -> Reply:
        why = "was not waited for, because the run stops"
        while not gives_up():
            left_s = until_s - time.perf_counter()
            try:
                return reply.result(min(max(0.0, left_s), _PATIENCE_S))
            except FutureTimeout:
                if left_s <= _PATIENCE_S:
                    limit_s = self._rewards.scoring.max_wait_s
                    why = f"was not done scoring.max_wait_s, {limit_s:g} s, after the last completion"
                    break
        reply.cancel()
        return failed(Failure("timeout", why), rows)


def _lacks_environment(reward: Reward, completion: Completion) -> bool:
    """Whether a function looks at environments, and that of the completion has failed: there is no reward to add to.
    Functions of whole groups are called with None in its place."""
    failed = completion.episode is not None and completion.episode.failure is not None
    return failed and ENVIRONMENTS in reward.interface.required and reward.interface.batch_size != "group"


def combined(rewards: Sequence[Reward], replies: dict[str, Reply], lengths: list[int], num_generations: int) -> Scores:
    """The weighted sum of what functions returned.

    A function that does not apply to a row adds nothing to its reward; where none applies the reward is 0.0, as in TRL.
    A row on which a function failed has no reward. In a group in which a function scores steps, a number that it
    returns is the reward of a single step, the whole completion.

    Args:
        replies: by name; steps by their ends in tokens.
        lengths: [B], tokens of the completions.
        num_generations: G, rows of a group.
    """
    failed_B = torch.tensor(
        [any(reply.failures[row] for reply in replies.values()) for row in range(len(lengths))], dtype=torch.bool
    )
    by_function: dict[str, torch.Tensor] = {}
    status: dict[str, torch.Tensor] = {}
    weighted, whole = [], []
    steps: list[dict[int, float]] = [{} for _ in lengths]  # by their ends, weighted
    scores_steps = False
    for reward in rewards:
        reply = replies[reward.name]
        value_B = torch.tensor(list(map(_sum, reply.values)), dtype=torch.float64)
        by_steps_B = _by_steps(reply.values, num_generations)
        by_function[reward.name] = value_B
        status[reward.name] = torch.tensor(list(map(_status, reply.values, reply.failures)), dtype=torch.int8)
        weighted.append(reward.weight * value_B)
        whole.append(reward.weight * value_B.masked_fill(by_steps_B, 0.0))
        scores_steps |= bool(by_steps_B.any())
        for row, value in enumerate(reply.values):
            if by_steps_B[row] and value is not None and not failed_B[row]:
                for end, step in value if isinstance(value, list) else [(lengths[row], value)]:
                    steps[row][end] = steps[row].get(end, 0.0) + reward.weight * step

    def total(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts).nansum(dim=0).masked_fill(failed_B, math.nan)

    return Scores(
        total(weighted),
        by_function,
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
