"""The environments of a run as a partner: one instance of the user's class per completion, in worker processes; and the
rewards that they give, in addition to those of functions."""

import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybrid_grpo.config import RolloutConfig, ScoringConfig, environment_rewards
from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.data.batch import Numbers, RewardStep, Rollout
from hybrid_grpo.data.completion import Message, Prompt
from hybrid_grpo.data.episodes import Episode, Observation, Opening
from hybrid_grpo.distributed.workers.calls import Call, Failure, Interface, Reply, call_inline
from hybrid_grpo.distributed.workers.leased_processes import Lease
from hybrid_grpo.distributed.workers.pool import Pool
from hybrid_grpo.rewards.functions import RewardValue
from hybrid_grpo.rewards.loader import Reward
from hybrid_grpo.rewards.scorer import EPISODES
from hybrid_grpo.turns.calls import ToolCall, Turn
from hybrid_grpo.turns.environments.in_worker import EnvironmentEntry
from hybrid_grpo.turns.observations import digest
from hybrid_grpo.turns.template import user_message
from hybrid_grpo.turns.trajectory import Answer, Finish, Seconds, Trajectory

_COLUMN = "environment"
"""Column that chooses the environment if there are several."""


@dataclass(frozen=True)
class Kind:
    """One entry of `rollout.environment`."""

    reward: str
    """Name of the environment's reward."""
    index: int
    """Index of the entry in the pool."""
    needed: list[str]
    """Columns that the environment's reset needs."""
    steps: bool
    """Whether every turn is a step of the environment; otherwise its methods are tools."""
    silent: bool
    """Whether `reset` is annotated with None, and so returns no initial observation."""
    tools: list[dict[str, Any]]
    """JSON schemas of the methods that are tools."""
    shows: bool
    """Whether observations may have pictures."""

    @property
    def tool_names(self) -> list[str]:
        return [schema["function"]["name"] for schema in self.tools]


@dataclass(eq=False)
class Instance:
    """The environment of a completion under way."""

    kind: Kind
    lease: Lease
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Rewards of turns, each with the number of tokens sampled up to its end."""
    total: float | None = None
    state: dict[str, Any] | None = None
    failure: str | None = None
    """Why the environment failed, after which it gets no more requests; None if it has not failed."""

    def take_end(self, found: dict[str, Any]) -> None:
        self.total, self.state = found["reward"], found["state"]

    @property
    def episode(self) -> Episode:
        if self.failure is not None:
            return Episode(self.kind.reward, failure=self.failure)
        return Episode(self.kind.reward, tuple(self.steps), self.total, self.state)


class Environments:
    """The classes of `rollout.environment`: a `Partner` that answers turns that are steps. `Tools` calls the others.
    Creating it raises UserError if a class cannot be imported, or is not an environment."""

    setting, reads_last = "rollout.environment", True

    def __init__(self, config: RolloutConfig, scoring: ScoringConfig) -> None:
        named = config.environments
        settings = [f"{self.setting}.{name}" if name else self.setting for name in named]
        entries = [(s, EnvironmentEntry(place)) for s, place in zip(settings, named.values(), strict=True)]
        pool = self._pool = Pool(entries, scoring)
        self._most = _most_processes(config)
        # generate() continues only once all completions are answered: none may wait until another one ends.
        self._leases = pool.leases(config.tool_timeout_s, self._most if config.decoder == "paged" else None)
        rewards = environment_rewards(config)
        self.kinds: dict[str, Kind] = {
            name: Kind(rewards[name], index, interface.required, **interface.schema)
            for index, (name, interface) in enumerate(zip(named, pool.interfaces, strict=True))
        }
        """The entries by name; a single entry has an empty name."""
        self.shows = any(kind.shows and kind.steps for kind in self.kinds.values())
        self._instances: dict[int, Instance] = {}
        self.seconds = Seconds()

    def kind(self, prompt: Prompt) -> Kind:
        """Return the entry of `rollout.environment` for a prompt."""
        return self.kinds[prompt.columns[_COLUMN] if "" not in self.kinds else ""]

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise UserError if a row chooses no environment, or lacks a column that the reset needs."""
        for prompt in prompts:
            where = f"row {prompt.id} (from 0) of the data"
            if "" not in self.kinds and prompt.columns.get(_COLUMN) not in self.kinds:
                given = prompt.columns.get(_COLUMN)
                raise UserError(
                    f"rollout.environment names several, and {where} has environment {given!r}:"
                    f" {did_you_mean(str(given), self.kinds)}"
                )
            for name in self.kind(prompt).needed:
                if name not in prompt.columns and name != "prompt":
                    raise UserError(
                        f"rollout.environment: reset of {self.kind(prompt).reward} needs {name}, and {where} has no"
                        f" such column: {did_you_mean(name, prompt.columns)}"
                    )

    def openings(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Opening]:
        """Reset the environments of prompts, at most `_most` at a time, and wait for all. Failures are printed."""
        free = threading.BoundedSemaphore(self._most)
        asked: list[Future[Reply]] = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            asked.append(future := Future[Reply]())
            if self.kind(prompt).silent:
                future.set_result(Reply([{"said": None}], [None]))
                continue
            free.acquire()
            lease = self._leases.lease(self.kind(prompt).index)
            future.add_done_callback(lambda _: free.release())
            lease.ask(self._begin(prompt, Opening(seed, prompt.text), is_first=True), future.set_result)
            lease.release()
        rows = [(p, seed, begun.result()) for p, seed, begun in zip(prompts, seeds, asked, strict=True)]
        if failed := [(prompt, failure) for prompt, _, reply in rows for failure in reply.failures if failure]:
            prompt, failure = failed[0]
            print(
                f"rollout.environment: {len(failed)} of {len(prompts)} prompts could not be opened; for row {prompt.id}"
                f" (from 0) {self.kind(prompt).reward} {failure.message}. Their completions get no reward, and are"
                f" counted as failed\n{failure.traceback}",
                file=sys.stderr,
                flush=True,
            )
        return [
            Opening(seed, prompt.text, (reply.values[0] or {}).get("said"), failure.message if failure else None)
            for prompt, seed, reply in rows
            for failure in reply.failures
        ]

    def _begin(self, prompt: Prompt, opening: Opening, *, is_first: bool) -> dict[str, Any]:
        known = {name: v for name, v in prompt.columns.items() if name != _COLUMN or "" in self.kinds}
        columns = {**known, "prompt": opening.text}
        said = opening.observation
        observed = {"observation": said and said.text, "pictures": list(map(digest, said.pictures)) if said else []}
        return {"do": "begin", "columns": columns, "seed": opening.seed, **observed, "is_first": is_first}

    def _instance(self, trajectory: Trajectory) -> Instance:
        """Return the environment of a completion, which is reset when it is first needed."""
        if trajectory.key not in self._instances:
            prompt = trajectory.prompt
            assert prompt is not None and prompt.opening is not None, "prompts are opened before they are completed"
            kind, failure = self.kind(prompt), prompt.opening.failure
            lease = self._leases.lease(kind.index)
            instance = self._instances[trajectory.key] = Instance(kind, lease, failure=failure)
            if failure is None:
                self._ask(instance, self._begin(prompt, prompt.opening, is_first=False), lambda _: None)
        return self._instances[trajectory.key]

    def _ask(self, instance: Instance, request: Mapping[str, Any], done: Callable[[Any], None]) -> None:
        """Make a request. `done` is called with its result, or None if it, and so the environment, has failed."""
        if instance.failure is not None:
            return done(None)
        start_s = time.perf_counter()

        def finish(reply: Reply) -> None:
            self.seconds.add("environment", time.perf_counter() - start_s)
            failure = reply.failures[0]
            if failure is not None:
                instance.failure = instance.failure or failure.message
            done(reply.values[0] if failure is None else None)

        instance.lease.ask(dict(request), finish)

    def call(
        self, trajectory: Trajectory, call: ToolCall, done: Callable[[Observation | None, Failure | None], None]
    ) -> None:
        """Call a method. `done` is called with what it returned, or with the reason why it failed. The environment
        itself fails only if its process is lost."""
        instance = self._instance(trajectory)
        if instance.failure is not None:
            return done(None, Failure("died", f"the environment has failed: it {instance.failure}"))

        def finish(reply: Reply) -> None:
            failure = reply.failures[0]
            if failure is not None and failure.kind in ("timeout", "died"):
                instance.failure = instance.failure or failure.message
            done(reply.values[0]["said"] if failure is None else None, failure)

        instance.lease.ask({"do": "call", "tool": call.name, "arguments": call.arguments}, finish)

    def has_failed(self, trajectory: Trajectory) -> bool:
        return trajectory.key in self._instances and self._instances[trajectory.key].failure is not None

    def example(self, content: str | Observation) -> Message:
        return user_message(content)

    def takes(self, trajectory: Trajectory, turn: Turn) -> bool:
        return trajectory.prompt is not None and self.kind(trajectory.prompt).steps

    def answer(self, trajectory: Trajectory, turn: Turn, done: Callable[[Answer], None]) -> None:
        """Answer a turn with the observation of its step; the completion ends if the environment is done."""
        instance, end = self._instance(trajectory), trajectory.sampled

        def finish(found: dict[str, Any] | None) -> None:
            if found is None:
                return done(Answer(finish="stop"))
            if found["reward"] is not None:
                instance.steps.append((end, found["reward"]))
            if "end" not in found:
                return done(Answer([user_message(found["said"])]))
            instance.take_end(found["end"])
            done(Answer(finish="stop" if found["done"] else "length"))

        self._ask(instance, {"do": "step", "text": turn.content, "is_last": trajectory.is_last}, finish)

    def end(self, trajectory: Trajectory, finish: Finish, done: Callable[[Answer], None]) -> None:
        """End the environment of a completion that ends; `done` is called after that."""
        instance = self._instance(trajectory)

        def ended(found: dict[str, Any] | None) -> None:
            if found is not None:
                instance.take_end(found)
            done(Answer(finish=finish))

        self._ask(instance, {"do": "end"}, ended)

    def episode(self, key: int) -> Episode | None:
        """Return the outcome of a completion's environment, if it has one, and release its process."""
        instance = self._instances.pop(key, None)
        if instance is None:
            return None
        instance.lease.release()
        return instance.episode

    def give_up(self) -> None:
        """Release the environments of all completions under way, which are abandoned."""
        for instance in self._instances.values():
            instance.lease.release()
        self._instances = {}

    def numbers(self, rollout: Rollout) -> Numbers:
        unopened = [prompt for prompt in rollout.prompts if not _is_open(prompt)]
        rows = zip(rollout.row_prompts, rollout.completions, strict=True)
        ended = [(prompt, completion.episode) for prompt, completion in rows if completion.episode is not None]
        failed = sum(episode.failure is not None for _, episode in ended)
        return {
            "environment/openings_failed_frac": (len(unopened) / max(len(rollout.prompts), 1), len(rollout.prompts)),
            "environment/resets": (sum(_is_open(prompt) for prompt, _ in ended), 1),
            "environment/failed_frac": (failed / max(len(ended), 1), len(ended)),
            **self.seconds.numbers(["environment"]),
        }


def _is_open(prompt: Prompt) -> bool:
    return prompt.opening is None or prompt.opening.failure is None


def _most_processes(config: RolloutConfig) -> int:
    """Return the maximum number of environment processes on this rank, each of which takes one of its open files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = sys.maxsize if files == resource.RLIM_INFINITY else max(1, files // 2)
    most = config.environment_processes
    refuse(
        most is not None and most > room,
        f"rollout.environment_processes {most}: the process may open {files} files, half of them for environments: set"
        f" it to {room} or lower, or raise the limit (ulimit -n)",
    )
    return min(config.max_slots, room) if most is None else most


def rewards_of(names: list[str], *, by_turn: bool) -> list[Reward]:
    """Return a reward of weight 1 for each of these names. A reward does not apply to completions of other
    environments, or if the environment gave none; it fails if the environment failed.

    Args:
        by_turn: whether rewards of turns stay rewards of steps; otherwise they are added up.
    """
    interface = Interface([], [EPISODES], False, "group")
    return [
        Reward(name, 1.0, frozenset(), interface, partial(call_inline, partial(_score, name, by_turn)))
        for name in dict.fromkeys(names)
    ]


def _score(name: str, by_turn: bool, call: Call) -> Reply:
    episodes: list[Episode | None] = call.inputs[EPISODES]
    own = [episode if episode is not None and episode.reward == name else None for episode in episodes]
    return Reply(
        [_value(episode, length, by_turn) for episode, length in zip(own, call.expected, strict=True)],
        [Failure("invalid", e.failure) if e is not None and e.failure is not None else None for e in own],
    )


def _value(episode: Episode | None, length: int, by_turn: bool) -> RewardValue:
    if episode is None or episode.failure is not None:
        return None
    if episode.parts and by_turn:
        shares = defaultdict[int, float](float)
        for part in episode.parts:
            shares[part.spans[-1][1]] += part.reward / len(episode.parts)
        return sorted(shares.items())
    steps: list[RewardStep] = list(episode.steps)
    if steps and by_turn:
        ends = dict(steps)
        if episode.total is not None:
            ends[length] = ends.get(length, 0.0) + episode.total
        return sorted(ends.items())
    earned = [reward for _, reward in steps] + ([] if episode.total is None else [episode.total])
    return sum(earned) if earned else None
