"""Scores completions with the reward functions of a run, and adds up their rewards.

Completions are scored while others are still being sampled: a function is called as soon as its next batch is complete.
A batch is a fixed number of completions, or all completions of a prompt.

A completion on which a function fails (it raises, hangs, dies, or returns something that is not a reward) has no reward
and is left out of its group. If too many fail, the run ends.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_grpo.config import ScoringConfig
from hybrid_grpo.config.errors import RunStopped, UserError, did_you_mean
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Scores
from hybrid_grpo.distributed.ranks import all_reduce
from hybrid_grpo.distributed.workers.calls import Call, Failure, Inputs, Reply, busy_seconds, failed
from hybrid_grpo.distributed.workers.snapshots import Snapshot
from hybrid_grpo.rewards.functions import ENVIRONMENTS, INPUTS, PICTURES, PROMPT_PICTURES, RewardValue
from hybrid_grpo.rewards.loader import Reward
from hybrid_grpo.rewards.models.reward_model import RewardModel, Shard
from hybrid_grpo.rewards.steps import TokenEnds, token_steps
from hybrid_grpo.rewards.sums import combined
from hybrid_grpo.rewards.unread import UnreadAnswers

EPISODES = "episodes/"
"""Name of the input with the episodes, for environments' own rewards; no column or parameter can have this name."""
_CHECKED_AT_ONCE = 1000
"""Rows that a function judges in one call before a run; if it fails, each of them is judged again by itself."""
_PATIENCE_S = 0.2
"""Seconds between two checks of whether the run is stopping."""


@dataclass(frozen=True)
class Timeline:
    """The length of a run, as functions learn it."""

    steps: int = 1
    epoch_steps: float = 1.0
    """Steps in which every prompt is drawn once."""

    def state(self, done: int) -> dict[str, Any]:
        """Return the fields of TRL's `trainer_state` when this number of steps is completed."""
        return {
            "global_step": done, "max_steps": self.steps, "epoch": done / self.epoch_steps,
            "num_train_epochs": math.ceil(self.steps / self.epoch_steps),
            "is_world_process_zero": os.environ.get("RANK", "0") == "0",
            "is_local_process_zero": os.environ.get("LOCAL_RANK", "0") == "0",
        }  # fmt: skip


class Rewards:
    """The reward functions of a run, each with a unique name. The policy's `tokenizer` is used to find the token at
    which a step given as text ends; without a tokenizer, all such steps end with the completion. `environments` are the
    rewards that the environments themselves give. Functions see `timeline` as `trainer_state`."""

    def __init__(
        self, rewards: Sequence[Reward], scoring: ScoringConfig | None = None, tokenizer: Any = None,
        environments: Sequence[Reward] = (), timeline: Timeline | None = None,
    ) -> None:  # fmt: skip
        self.functions = [*rewards, *environments]
        self.inputs: tuple[str, ...] = (*INPUTS, ENVIRONMENTS) if environments else INPUTS
        self.scoring = scoring or ScoringConfig()
        self.token_ends = None if tokenizer is None else TokenEnds(tokenizer)
        self.timeline = timeline or Timeline()
        forms = {reward.name: reward.interface.schema.get("reads", "") for reward in self.functions}
        self.unread = UnreadAnswers({name: form for name, form in forms.items() if form})
        self._reported: set[tuple[str, str]] = set()

    @property
    def names(self) -> list[str]:
        return [reward.name for reward in self.functions]

    @property
    def models(self) -> list[RewardModel]:
        """The reward models that functions hold in this process, without duplicates."""
        return list({id(reward.model): reward.model for reward in self.functions if reward.model is not None}.values())

    def load_models(self, shard: Shard | None = None) -> None:
        """Load `models` now rather than when they are first called. Collective. `shard` shards a model over the ranks.
        Raises UserError if a model does not load, for example without `shard`."""
        self._each_model(lambda model: model.load(shard))

    def _each_model(self, call: Callable[[RewardModel], None]) -> None:
        for model in self.models:
            try:
                call(model)
            except ValueError as error:
                raise UserError(f"rewards: reward_model: {error}") from error

    def check_prompts(self, prompts: Sequence[Prompt], data: str = "the data") -> None:
        """Raise UserError unless the functions can score completions of these prompts, of which there is at least one:
        see `check_columns`. Functions that the rank itself calls must be able to judge an empty completion of each, and
        reward models that see to read the pictures, if there are any."""
        self.check_columns(prompts[0].columns, data)
        for reward in self.functions:
            if reward.inline:
                self._check_answers(reward, [prompt for prompt in prompts if reward.applies(prompt)], data)
            if own := [prompt for prompt in prompts if prompt.source in reward.sources]:
                # Prompts have the columns of all sources, with None for those that their own source lacks.
                has = dict.fromkeys(name for of in own for name, value in of.columns.items() if value is not None)
                self._check_required(reward, has, f"source {' or '.join(sorted(reward.sources))}")
        if any(prompt.pictures for prompt in prompts):
            self._each_model(RewardModel.check_pictures)

    def _check_answers(self, reward: Reward, prompts: Sequence[Prompt], data: str) -> None:
        """Refuse the first row that an inline function could not judge, whatever is answered."""
        needed = {*reward.interface.required} - {"completions"}
        if not needed or needed & {*self.inputs}:
            return
        for first in range(0, len(prompts), _CHECKED_AT_ONCE):
            rows = prompts[first : first + _CHECKED_AT_ONCE]
            columns = {name: [row.columns.get(name) for row in rows] for name in needed}
            reply = reward.caller(Call({"completions": [""] * len(rows), **columns}, [0] * len(rows))).result()
            for row, why in zip(rows, reply.failures, strict=True):
                if why is not None:
                    raise UserError(
                        f"rewards: {reward.name} cannot judge row {row.id} (from 0) of {data}: {why.message}"
                    )

    def check_columns(self, columns: Collection[str], data: str = "the data") -> None:
        """Raise UserError unless the functions can be called with these columns, which exclude the prompt. `data` says
        in messages what has the columns. No column may have the name of an input or of one of `kwargs`, and no required
        column may be missing."""
        for name in self.inputs:
            if name in columns:
                raise UserError(
                    f"rewards: column {name} of {data} has the name of an input that rewards receive from the rollout:"
                    " rename it"
                )
        for reward in self.functions:
            for name in columns:
                if name in reward.kwargs and reward.interface.accepts(name):
                    raise UserError(
                        f"rewards: {reward.name} has {name} both in kwargs and as a column of {data}: rename one"
                    )
            self._check_required(reward, columns, data)

    def _check_required(self, reward: Reward, columns: Collection[str], data: str) -> None:
        for name in reward.interface.required:
            if not {name, reward.interface.instead.get(name)} & {*columns, *self.inputs}:
                why = f"which is neither a column of {data} nor in its kwargs: {did_you_mean(name, columns)}"
                if name == ENVIRONMENTS:
                    why = "which rollout.environment makes and saved rollouts lack: give the argument a default"
                raise UserError(f"rewards: {reward.name} needs {name}, {why}")

    def stream(self, prompts: list[Prompt], num_generations: int, step: int = 1) -> Stream:
        """Score completions of these prompts as they arrive, in a step of the run, from 1; see `Stream`."""
        return Stream(self, prompts, num_generations, step - 1)

    def refuse_failures(self, scores: Scores, device: torch.device) -> None:
        """Raise RunStopped on every rank if a function failed on too large a share of all ranks' completions.
        Collective: each rank passes the scores of its own completions, and the device on which counts are exchanged."""
        counts = [int((status_B >= RewardStatus.FAILED).sum()) for status_B in scores.status.values()]
        *failures, rows = all_reduce(torch.tensor([*counts, len(scores.reward_B)], device=device)).tolist()
        limit = self.scoring.max_failed_frac
        for name, count in zip(scores.status, failures, strict=True):
            if count > limit * rows:
                raise RunStopped(
                    f"rewards: {name} failed on {count} of {rows} completions, more than scoring.max_failed_frac"
                    f" {limit:g}: the first failures are printed above; fix the function and continue with"
                    " --run.resume auto"
                )

    def score(
        self, prompts: list[Prompt], completions: list[Completion], num_generations: int = 1, done: int = 0
    ) -> Scores:
        """Score completions that are all finished, each with its prompt; raises UserError like `check_columns`. `done`
        is the number of steps that are completed."""
        with Stream(self, prompts[::num_generations], num_generations, done) as stream:
            for row, completion in enumerate(completions):
                stream.add(row // num_generations, row % num_generations, completion)
            return stream.scores()

    def report(self, name: str, failure: Failure, prompt: Prompt) -> None:
        """Print a failure on a completion of a prompt, unless one of the same function and kind has been printed."""
        if (name, failure.kind) not in self._reported:
            self._reported.add((name, failure.kind))
            row = f"The completion of row {prompt.id} (from 0) has no reward and counts as failed"
            print(f"rewards: {name} {failure.message}. {row}\n{failure.traceback}", file=sys.stderr, flush=True)


class Stream:
    """Scores a rollout whose completions arrive one by one.

        with rewards.stream(prompts, num_generations) as stream:
            ...  # call stream.add for every completion
            scores = stream.scores()

    Leaving the block cancels the calls that are still in progress. `prompts` may be empty.
    """

    def __init__(self, rewards: Rewards, prompts: list[Prompt], num_generations: int, done: int) -> None:
        self._rewards = rewards
        self._prompts = prompts
        self._num_generations = num_generations
        self._state = rewards.timeline.state(done)
        first = prompts[0].columns if prompts else {}
        # Functions receive the columns that all prompts have.
        self._columns = [name for name in first if all(name in prompt.columns for prompt in prompts)]
        if prompts:
            rewards.check_columns(self._columns)
        self._completions: dict[int, Completion] = {}
        self._waiting: dict[tuple[str, int | None], list[int]] = defaultdict(list)
        """Rows for the next call of each function, by function name and, if a call takes a group, by prompt."""
        self._calls: dict[str, list[tuple[list[int], Future[Reply]]]] = {name: [] for name in rewards.names}
        """The rows and the future reply of each call, by function name."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        for reply in self._replies():
            reply.cancel()

    def add(self, prompt: int, sample: int, completion: Completion) -> None:
        """Add completion `sample` of prompt `prompt`. This neither waits for functions nor raises their exceptions."""
        row = prompt * self._num_generations + sample
        assert row not in self._completions, f"completion {sample} of prompt {prompt} came twice"
        self._completions[row] = completion
        has_failed = completion.episode is not None and completion.episode.failure is not None
        for reward in self._rewards.functions:
            size = reward.interface.batch_size
            # Functions that score whole groups are called even then, with None in place of the environment that failed.
            if has_failed and ENVIRONMENTS in reward.interface.required and size != "group":
                continue
            if reward.sources and not reward.applies(self._prompts[prompt]):
                continue
            group, size = (prompt, self._num_generations) if size == "group" else (None, size)
            self._waiting[reward.name, group].append(row)
            if len(self._waiting[reward.name, group]) == size:
                self._start(reward, group)

    def scores(self, gives_up: Callable[[], bool] = lambda: False, chosen: Sequence[int] | None = None) -> Scores:
        """Wait for the functions and return the scores, ordered by prompt and sample. Rows without a reply after
        `scoring.max_wait_s`, or once `gives_up` returns True, count as timed out. `chosen` are the prompts whose groups
        count, in the order wanted (default: all); others may lack completions. Collective if all ranks call one of the
        functions together; see `Interface.batch_size`."""
        groups, size = range(len(self._prompts)) if chosen is None else chosen, self._num_generations
        kept = {group * size + k for group in groups for k in range(size)}
        assert kept <= self._completions.keys(), "a completion is missing"
        self._waiting.update({key: [row for row in rows if row in kept] for key, rows in self._waiting.items()})
        functions = self._rewards.functions
        # Functions that all ranks call together are called last, because they block.
        for reward in sorted(functions, key=lambda reward: reward.interface.batch_size == "all"):
            if self._waiting[reward.name, None] or reward.interface.batch_size == "all":
                self._start(reward, None)
        until_s = time.perf_counter() + self._rewards.scoring.max_wait_s
        replies = {name: self._reply(name, kept, until_s, gives_up) for name in self._rewards.names}
        ended = [self._completions.get(row) for row in range(len(self._prompts) * size)]
        scores = combined(functions, replies, [len(c.token_ids) if c else 0 for c in ended], size)
        if scores.extra:
            self._rewards.unread.add(scores, (c.text for c in ended if c))
        return scores if chosen is None else scores.groups(chosen, size)

    @property
    def seconds(self) -> float:
        """Seconds during which at least one of the finished calls was running."""
        return busy_seconds(r.result() for r in self._replies() if r.done() and not r.cancelled())

    def _replies(self) -> list[Future[Reply]]:
        return [reply for calls in self._calls.values() for _, reply in calls]

    def _start(self, reward: Reward, group: int | None) -> None:
        """Call a function with the rows that are waiting for it."""
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
        if PICTURES in reward.interface.required or any(completion.pictures for completion in completions):
            inputs[PICTURES] = [list(completion.pictures) for completion in completions]
        if PROMPT_PICTURES in (reward.interface.accepted or ()):
            inputs[PROMPT_PICTURES] = [prompt.pictures for prompt in prompts]
        if ENVIRONMENTS in self._rewards.inputs:
            states = [None if c.episode is None else c.episode.state for c in completions]
            inputs[ENVIRONMENTS] = [None if state is None else Snapshot(state) for state in states]
        accepted = {name: values for name, values in inputs.items() if reward.interface.accepts(name)}
        if EPISODES in (reward.interface.accepted or ()):
            accepted[EPISODES] = [completion.episode for completion in completions]
        call = Call(accepted, [len(completion.token_ids) for completion in completions], self._state)
        self._calls[reward.name].append((rows, reward.caller(call)))

    def _reply(self, name: str, kept: set[int], until_s: float, gives_up: Callable[[], bool]) -> Reply:
        """Join a function's replies for all rows, as far as calls have any of the rows `kept`. Late rows count as timed
        out; step texts become ends in tokens."""
        rows = len(self._prompts) * self._num_generations
        values: list[RewardValue] = [None] * rows
        failures: list[Failure | None] = [None] * rows
        extra: dict[str, list[object]] = {}
        for call_rows, future in self._calls[name]:
            if kept.isdisjoint(call_rows):
                continue
            reply = self._wait(future, len(call_rows), until_s, gives_up)
            for index, row in enumerate(call_rows):
                values[row], failures[row] = self._in_tokens(reply.values[index], reply.failures[index], row)
                for column, stored in reply.extra.items():
                    extra.setdefault(column, [None] * rows)[row] = stored[index]
        for row, failure in enumerate(failures):
            if failure is not None:
                self._rewards.report(name, failure, self._prompts[row // self._num_generations])
        return Reply(values, failures, extra)

    def _in_tokens(self, value: RewardValue, failure: Failure | None, row: int) -> tuple[RewardValue, Failure | None]:
        if not isinstance(value, list) or not value or not isinstance(value[0][0], str):
            return value, failure
        try:
            return token_steps(value, self._completions[row], self._rewards.token_ends), None
        except ValueError as error:
            return None, Failure("invalid", f"returned steps that do not make up the text: {error}")

    def _wait(self, reply: Future[Reply], rows: int, until_s: float, gives_up: Callable[[], bool]) -> Reply:
        why = "was not awaited because the run is stopping"
        while not gives_up():
            left_s = until_s - time.perf_counter()
            try:
                return reply.result(min(max(0.0, left_s), _PATIENCE_S))
            except FutureTimeout:
                if left_s <= _PATIENCE_S:
                    limit_s = self._rewards.scoring.max_wait_s
                    why = f"had not finished scoring.max_wait_s, {limit_s:g} s, after the last completion"
                    break
        reply.cancel()
        return failed(Failure("timeout", why), rows)
