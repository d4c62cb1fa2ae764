"""Conversations of a model with those who answer its turns, as the decoder asks for them between the turns."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hybrid_grpo.config import DataConfig, RolloutConfig, TrainConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.batch import Completion, Message, Numbers
from hybrid_grpo.generation import Request
from hybrid_grpo.turns.calls import Turn, reader_of
from hybrid_grpo.turns.conversation import Answer, Conversation, Finish, Partner
from hybrid_grpo.turns.template import Between, assistant_message
from hybrid_grpo.turns.tools import Tools
from hybrid_grpo.turns.users import ModelUser, User, user_of

_LETTERS_OF_A_TOKEN = 32
"""What is answered beyond so many letters for each token that is kept is not tokenized at all."""


class Conversations:
    """Answers the turns of completions with what the partners of the model say; has the form of `Turns`.

    A turn that no partner takes ends its completion. The answers to different completions come as they are ready,
    without any influence on what the completions become.

    Args:
        partners: who answers; the first that takes a turn.
        tools: those of the partners that are functions; None where the model has no tools.
        user: the one of the partners that plays the user; None where nobody does.
        tokenizer, variables, stop_ids: see `Between`.

    Raises UserError where the tokenizer cannot express what partners say, or the calls of tools.
    """

    def __init__(
        self,
        partners: Sequence[Partner],
        tools: Tools | None,
        config: RolloutConfig,
        tokenizer: Any,
        variables: dict[str, Any],
        stop_ids: tuple[int, ...],
        user: User | None = None,
    ) -> None:
        self._partners, self.tools, self.user = partners, tools, user
        self._config, self._tokenizer = config, tokenizer
        self._read = None if tools is None else reader_of(config.tool_format, tokenizer)
        self._between = Between(tokenizer, variables, self.schemas, stop_ids)
        for speaker in partners:
            self._between.check(speaker.setting, speaker.example)
        self._stop_ids = set(stop_ids)
        self._requests: dict[int, Request] = {}
        self._under_way: dict[int, Conversation] = {}
        self._answers: queue.SimpleQueue[tuple[Conversation, int, Answer]] = queue.SimpleQueue()
        self._frames: dict[tuple[Any, ...], int] = {}
        self._waited_s = 0.0

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the model is told of its tools."""
        return self.tools.schemas if self.tools is not None else []

    @property
    def tool_names(self) -> list[str]:
        """Names of the tools."""
        return self.tools.names if self.tools is not None else []

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raise UserError where the rows lack a column that the user needs."""
        if self.user is not None:
            self.user.check_columns(columns)

    def load(self, device: torch.device) -> None:
        """Load the model that plays the user, if one does; raises UserError where it does not load."""
        if isinstance(self.user, ModelUser):
            self.user.load(device)

    def begin(self, requests: Sequence[Request]) -> None:
        """See `Turns`. Counts begin anew."""
        self._under_way = {}
        self._requests = {key: request for request in requests for key in request.keys}
        self.numbers()

    def ended(self, key: int, turn_ids: list[int], room: int) -> Finish | None:
        """See `Turns`. A completion whose last turn calls a tool, without room for another, is cut."""
        conversation = self._conversation(key)
        conversation.sampled += len(turn_ids)
        conversation.is_last = room <= 0 or conversation.turns + 1 >= self._config.max_turns
        turn = self._turn(turn_ids)
        speaker = next((p for p in self._partners if p.takes(conversation, turn)), None)
        if speaker is None:
            return "stop"
        if conversation.is_last and not speaker.reads_last:
            return "length"
        conversation.turns += 1
        conversation.last = turn_ids[-1]
        conversation.messages.append(assistant_message(turn.content, turn.calls))
        speaker.answer(conversation, turn, partial(self._take, conversation, conversation.turns))
        return None

    def _conversation(self, key: int) -> Conversation:
        if key not in self._under_way:
            request = self._requests.get(key)
            self._under_way[key] = Conversation(key, request.prompt if request else None)
        return self._under_way[key]

    def _take(self, conversation: Conversation, turn: int, answer: Answer) -> None:
        self._answers.put((conversation, turn, answer))

    def _turn(self, turn_ids: list[int]) -> Turn:
        spoken = turn_ids[:-1] if turn_ids[-1] in self._stop_ids else turn_ids
        if self._read is None:
            return Turn(self._tokenizer.decode(spoken, skip_special_tokens=True))
        # The formats of some models need special tokens, but none needs the one that ends the turn.
        return self._read(self._tokenizer.decode(spoken, skip_special_tokens=False))

    def answers(self, patience_s: float) -> list[tuple[int, list[int] | Finish]]:
        """See `Turns`."""
        ready: list[tuple[int, list[int] | Finish]] = []
        while True:
            try:
                if patience_s and not ready:
                    start_s = time.perf_counter()
                    try:
                        # The decoder is idle, so every conversation that waits for a model is in one batch.
                        if isinstance(self.user, ModelUser):
                            self.user.speak(self._under_way)
                        conversation, turn, answer = self._answers.get(timeout=patience_s)
                    finally:
                        self._waited_s += time.perf_counter() - start_s
                else:
                    conversation, turn, answer = self._answers.get_nowait()
            except queue.Empty:
                return ready
            if self._under_way.get(conversation.key) is not conversation or conversation.turns != turn:
                continue  # of a rollout that was given up
            ready.append((conversation.key, answer.finish or self._written(conversation, answer.messages)))

    def _written(self, conversation: Conversation, messages: list[Message]) -> list[int]:
        """The tokens of messages that answer a turn, each cut to its share of `max_tool_tokens`."""
        room = self._config.max_tool_tokens - self._frame(conversation.last, messages)
        cut = [{**m, "content": self._cut(m["content"], max(0, room // len(messages)))} for m in messages]
        conversation.messages += cut
        return self._between.ids(conversation.last, cut)

    def _frame(self, last: int, messages: list[Message]) -> int:
        """Tokens of the template around the contents of these messages."""
        speakers = (last, *((message["role"], message.get("name")) for message in messages))
        if speakers not in self._frames:
            self._frames[speakers] = len(self._between.ids(last, [{**m, "content": ""} for m in messages]))
        return self._frames[speakers]

    def _cut(self, text: str, tokens: int) -> str:
        short = text[: tokens * _LETTERS_OF_A_TOKEN]
        ids = self._tokenizer(short, add_special_tokens=False)["input_ids"]
        if len(ids) <= tokens and len(short) == len(text):
            return text
        kept: str = self._tokenizer.decode(ids[:tokens])
        return kept

    def finished(self, key: int, completion: Completion) -> Completion:
        """See `Turns`."""
        conversation = self._under_way.pop(key, None)
        before = conversation.messages if conversation is not None else []
        if len(before) and before[-1]["role"] == "assistant":
            before = before[:-1]  # the last turn was heard, and the completion ended with it
        return replace(completion, messages=(*before, assistant_message(completion.text, [])))

    def numbers(self) -> Numbers:
        """What happened since `begin`, or the last call of this, by metric."""
        waited_s, self._waited_s = self._waited_s, 0.0
        numbers: Numbers = {"time/tool_wait_s": (waited_s, 1)}
        for speaker in self._partners:
            numbers |= speaker.numbers()
        return numbers


def conversations_of(config: TrainConfig, tokenizer: Any, ends: tuple[int, ...]) -> Conversations | None:
    """What answers the turns of completions that `ends` end; None where a completion is one turn. Raises UserError
    where those who answer, or the tokenizer, cannot be used."""
    rollout, data = config.rollout, config.data
    if not rollout.has_turns:
        return None
    has_chats = tokenizer.chat_template is not None and data.chat_template != "never"
    refuse(
        bool(rollout.tools) and not has_chats,
        "rollout.tools are called in chats: take a policy.model whose tokenizer has a chat template that knows tools,"
        " and data.chat_template auto or always",
    )
    refuse(
        not has_chats,
        f"{rollout.user_setting} speaks in chats: take a policy.model whose tokenizer has a chat template, and"
        " data.chat_template auto or always",
    )
    tools = Tools(rollout, config.scoring) if rollout.tools else None
    user = user_of(rollout, config.scoring, config.policy)
    partners: list[Partner] = [partner for partner in (tools, user) if partner is not None]
    return Conversations(partners, tools, rollout, tokenizer, data.chat_template_kwargs, ends, user)


def with_tools(data: DataConfig, conversations: Conversations | None) -> DataConfig:
    """The settings of data whose prompts tell the model of its tools, and are all chats."""
    if conversations is None:
        return data
    variables = dict(data.chat_template_kwargs)
    if conversations.schemas:
        variables["tools"] = conversations.schemas
    return replace(data, chat_template="always", chat_template_kwargs=variables)
