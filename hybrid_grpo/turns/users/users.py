"""Users that answer the model's turns: a function in worker processes, or a frozen model in this process."""

from __future__ import annotations

import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hybrid_grpo.config import PolicyConfig, RolloutConfig, ScoringConfig
from hybrid_grpo.config.errors import did_you_mean, refuse
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.config.user_code import describe
from hybrid_grpo.data.batch import Numbers, Rollout
from hybrid_grpo.data.chat_template import apply_template
from hybrid_grpo.data.chat_text import ChatText
from hybrid_grpo.data.completion import Completion, Message, Prompt
from hybrid_grpo.data.episodes import Observation
from hybrid_grpo.distributed.hardware import device_bytes
from hybrid_grpo.distributed.workers.calls import Call, Failure, Reply, failed
from hybrid_grpo.distributed.workers.pool import Pool
from hybrid_grpo.generation import Request, Sampling, stream_key
from hybrid_grpo.generation.beside import user_workspace
from hybrid_grpo.generation.rollout import attention_of, complete
from hybrid_grpo.model.architectures import check_architecture
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.limits import stop_ids
from hybrid_grpo.model.loading import load_config, load_model, load_tokenizer
from hybrid_grpo.turns.calls import Turn
from hybrid_grpo.turns.template import user_message
from hybrid_grpo.turns.trajectory import Answer, Seconds, Trajectory, call_numbers
from hybrid_grpo.turns.users.functions import MESSAGES, UserEntry

_COLUMN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class _Pending:
    """A turn that waits for the user's answer."""

    trajectory: Trajectory
    done: Callable[[Answer], None]
    start_s: float = field(default_factory=time.perf_counter)


class User(ABC):
    """The `Partner` that plays the user. If it fails, the conversation ends."""

    reads_last = shows = False

    def __init__(self, config: RolloutConfig) -> None:
        assert config.user_setting is not None
        self.setting, self._stops = config.user_setting, config.user_stop
        self.seconds = Seconds()
        self._printed: set[str] = set()
        """Kinds of failures that have been printed."""

    def example(self, content: str | Observation) -> Message:
        return user_message(content)

    def takes(self, trajectory: Trajectory, turn: Turn) -> bool:
        """Whether another turn may follow; after the last turn allowed the conversation is over. True also if only the
        limit of tokens prevents another turn, so that the completion counts as cut."""
        return not trajectory.is_last or trajectory.is_full

    @abstractmethod
    def answer(self, trajectory: Trajectory, turn: Turn, done: Callable[[Answer], None]) -> None:
        """See `Partner`."""

    @abstractmethod
    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raise UserError if the rows lack a column that is needed."""

    def _said(self, turn: _Pending, said: Observation | None) -> None:
        self._count(turn, has_failed=False)
        if said is None or not said.text.strip() or any(stop in said.text for stop in self._stops):
            turn.done(Answer())
        else:
            turn.done(Answer([user_message(said)]))

    def _failed(self, turn: _Pending, failure: Failure) -> None:
        """End the conversation; the first failure of each kind is printed."""
        self._count(turn, has_failed=True)
        if failure.kind not in self._printed:
            self._printed.add(failure.kind)
            print(
                f"{self.setting} failed: {failure.message}. The conversation ends there, and the failure is counted\n"
                f"{failure.traceback}",
                file=sys.stderr,
                flush=True,
            )
        turn.done(Answer())

    def _count(self, turn: _Pending, *, has_failed: bool) -> None:
        turn.trajectory.calls.append(("user", has_failed))
        self.seconds.add("user", time.perf_counter() - turn.start_s)

    def numbers(self, rollout: Rollout) -> Numbers:
        return self.seconds.numbers(["user"]) | call_numbers("user", rollout.completions)


class ScriptedUser(User):
    """A function in worker processes that plays the user. Raises UserError if it cannot be imported or called."""

    def __init__(self, config: RolloutConfig, scoring: ScoringConfig) -> None:
        super().__init__(config)
        assert config.user is not None
        self._name = function_text(config.user)
        entry = UserEntry(self._name)
        self._pool = Pool([(self.setting, entry)], scoring)
        self._call = self._pool.isolated(0, config.tool_timeout_s)
        self.shows = self._pool.interfaces[0].schema["shows"]

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        for name in self._pool.interfaces[0].required:
            refuse(
                name not in columns,
                f"rollout.user {self._name} needs a column {name}, which the data does not have:"
                f" {did_you_mean(name, columns)}",
            )

    def answer(self, trajectory: Trajectory, turn: Turn, done: Callable[[Answer], None]) -> None:
        pending = _Pending(trajectory, done)

        def finish(future: Future[Reply]) -> None:
            reply = failed(Failure("died", "did not answer"), 1) if future.cancelled() else future.result()
            failure = reply.failures[0]
            if failure is not None:
                self._failed(pending, failure)
            else:
                self._said(pending, reply.values[0])

        given = {**_columns(trajectory), MESSAGES: _messages(trajectory)}
        self._call(Call({"arguments": [given]}, [None])).add_done_callback(finish)


class ModelUser(User):
    """A frozen model that plays the user. It reads the whole conversation anew in each turn, with roles exchanged.

    What it says depends only on the conversation and the key of the completion's random stream, not on the other
    conversations that wait for an answer. Creating it raises UserError if the model cannot play a user.
    """

    def __init__(self, config: RolloutConfig, policy: PolicyConfig) -> None:
        super().__init__(config)
        assert config.user_model is not None and config.user_prompt is not None
        name, self._prompt = config.user_model, config.user_prompt
        # `cache_gb` limits the policy's cache.
        self._config = replace(config, cache_gb=None)
        self._policy = replace(policy, model=name, gradient_checkpointing=False)
        model_config = load_config(name, self.setting)
        check_architecture(model_config, config.decoder, self.setting)
        check_files(name, model_config, pickled=policy.pickled_weights, setting=self.setting)
        self._tokenizer = load_tokenizer(name, self.setting)
        ends = stop_ids(name, self._tokenizer, [], model_config, self.setting)
        self._sampling = Sampling(config.max_tool_tokens, temperature=config.user_temperature, stop_ids=ends)
        self._positions: int | None = getattr(model_config, "max_position_embeddings", None)
        self._waiting: list[_Pending] = []
        self._model: Any = None
        refuse(
            self._tokenizer.chat_template is None,
            f"{self.setting} {name} has no chat template: take a model that was trained for chats",
        )
        self._text = ChatText(self._tokenizer, str(self._tokenizer.get_chat_template()))
        try:
            self._ids([{"role": role, "content": "."} for role in ("system", "assistant", "user")])
        except Exception as error:  # a template is a program of the model's authors
            refuse(
                True,
                f"{self.setting} {name}: its chat template refuses a system text and an assistant that speaks first:"
                f" {error}: take a model whose template has both",
            )

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        for name in _COLUMN.findall(self._prompt):
            refuse(
                name not in columns,
                f"rollout.user_prompt names a column {name}, which the data does not have:"
                f" {did_you_mean(name, columns)}",
            )

    def load(self, device: torch.device, longest: int) -> None:
        """Load the weights; raises UserError if they cannot be loaded. The policy's longest sequence has `longest`
        tokens."""
        attention, dtype = attention_of(self._config.decoder), self._policy.dtype
        self._model = load_model(self._policy, attention, self.setting).to(device).eval()
        self._workspace, _ = user_workspace(self._config, self._model.config, dtype, longest, device_bytes(device))
        if device.type != "cpu":
            # Takes its memory before the policy's cache takes all that is free.
            self._complete([Request(self._ids([user_message(".")]), [0])], replace(self._sampling, max_tokens=1))

    def _complete(self, requests: list[Request], sampling: Sampling) -> list[list[Completion]]:
        completions, _ = complete(
            self._model, self._tokenizer, requests, sampling, self._config, workspace=self._workspace
        )
        return completions

    def answer(self, trajectory: Trajectory, turn: Turn, done: Callable[[Answer], None]) -> None:
        """Add the turn to those that wait for `speak`."""
        self._waiting.append(_Pending(trajectory, done))

    def speak(self, under_way: Mapping[int, Trajectory]) -> None:
        """Answer the waiting turns of all trajectories that are still under way, in one batch."""
        waiting = [row for row in self._waiting if under_way.get(row.trajectory.key) is row.trajectory]
        self._waiting = []
        requests, asked = [], []
        for pending in waiting:
            ids = self._read(pending.trajectory)
            if isinstance(ids, Failure):
                self._failed(pending, ids)
                continue
            key = stream_key(pending.trajectory.key, "user", pending.trajectory.turns)
            requests.append(Request(ids, [key]))
            asked.append(pending)
        if not requests:
            return
        assert self._model is not None, "load() comes first"
        said = self._complete(requests, self._sampling)
        for pending, [completion] in zip(asked, said, strict=True):
            self._said(pending, Observation(completion.text.strip()))

    def _read(self, trajectory: Trajectory) -> list[int] | Failure:
        """Return the tokens of the conversation for the user's model, or the reason why it cannot read them."""
        columns = _columns(trajectory)
        system = _COLUMN.sub(lambda found: str(columns.get(found[1], found[0])), self._prompt)
        try:
            ids = self._ids([{"role": "system", "content": system}, *exchanged(_messages(trajectory))])
        except Exception as error:  # a template is a program of the model's authors
            return Failure("raised", f"its chat template refuses a conversation: {describe(error, None)}")
        longest = len(ids) + self._sampling.max_tokens
        if self._positions is None or longest <= self._positions:
            return ids
        return Failure("invalid", f"a conversation needs {longest} positions, and it has {self._positions}")

    def _ids(self, chat: list[Message]) -> list[int]:
        marked = [{**message, "content": self._text.marked(message["content"])} for message in chat]
        return self._text.ids(apply_template(self._tokenizer, marked))


def exchanged(messages: list[Message]) -> list[Message]:
    """Return a conversation from the user's side: the user's messages get the role of the assistant, and vice versa.
    The user does not read the system prompt, tool calls or their results."""
    roles = {"user": "assistant", "assistant": "user"}
    read = [message for message in messages if message["role"] in roles and not message.get("tool_calls")]
    return [{"role": roles[message["role"]], "content": message["content"]} for message in read]


def _messages(trajectory: Trajectory) -> list[Message]:
    """Return the conversation, including its prompt."""
    prompt: Prompt | None = trajectory.prompt
    text = [] if prompt is None else prompt.text
    return [*([user_message(text)] if isinstance(text, str) else text), *trajectory.messages]


def _columns(trajectory: Trajectory) -> dict[str, Any]:
    return {} if trajectory.prompt is None else trajectory.prompt.columns


def user_of(rollout: RolloutConfig, scoring: ScoringConfig, policy: PolicyConfig) -> User | None:
    """Create the partner that plays the user; None if there is none. Raises UserError if it cannot be used."""
    if rollout.user is not None:
        return ScriptedUser(rollout, scoring)
    return ModelUser(rollout, policy) if rollout.user_model is not None else None
