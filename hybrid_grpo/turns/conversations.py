"""Conversations of a model with its tools, as the decoder asks for them between the turns."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from hybrid_grpo.config import DataConfig, RolloutConfig, TrainConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.batch import Completion, Message, Numbers
from hybrid_grpo.turns.calls import Call, Turn, reader_of
from hybrid_grpo.turns.template import Between, assistant_message, tool_message
from hybrid_grpo.turns.tools import UNKNOWN, Tools

_LETTERS_OF_A_TOKEN = 32
"""What tools return beyond so many letters for each token that is kept is not tokenized at all."""


@dataclass
class _Conversation:
    """A completion under way."""

    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    last: int = -1
    """The token that ended the turn."""
    calls: list[Call] = field(default_factory=list)
    """Calls of the turn."""
    results: dict[int, str] = field(default_factory=dict)
    """By the number of the call."""


class Conversations:
    """Answers the turns of completions with what the tools that they call return; has the form of `Turns`.

    A turn without a call ends its completion. All calls of a turn run at the same time, and the answers to different
    completions come as they are ready, without any influence on what the completions become.

    Args:
        tools: the functions.
        tokenizer, variables, stop_ids: see `Between`.

    Raises UserError where the tokenizer cannot express tools.
    """

    def __init__(
        self,
        tools: Tools,
        config: RolloutConfig,
        tokenizer: Any,
        variables: dict[str, Any],
        stop_ids: tuple[int, ...],
    ) -> None:
        self.tools, self._config, self._tokenizer = tools, config, tokenizer
        self._read = reader_of(config.tool_format, tokenizer)
        self._between = Between(tokenizer, variables, tools.schemas, stop_ids)
        self._stop_ids = set(stop_ids)
        self._under_way: dict[int, _Conversation] = {}
        self._results: queue.SimpleQueue[tuple[int, _Conversation, int, int, str]] = queue.SimpleQueue()
        self._frames: dict[tuple[int, tuple[str, ...]], int] = {}
        self._waited_s = 0.0

    def begin(self) -> None:
        """See `Turns`. Counts begin anew."""
        self._under_way = {}
        self.numbers()

    def ended(self, key: int, turn_ids: list[int], room: int) -> Literal["stop", "length"] | None:
        """See `Turns`. A completion whose last turn calls a tool, without room for another, is cut."""
        conversation = self._under_way.setdefault(key, _Conversation())
        turn = self._turn(turn_ids)
        if not turn.calls and turn.fault is None:
            return "stop"
        if room <= 0 or conversation.turns + 1 >= self._config.max_turns:
            return "length"
        conversation.turns += 1
        conversation.last = turn_ids[-1]
        conversation.messages.append(assistant_message(turn.content, turn.calls))
        conversation.calls, conversation.results = turn.calls, {}
        if turn.fault is not None:
            self.tools.unreadable()
            conversation.calls = [*turn.calls, Call(UNKNOWN, {})]
            self._results.put((key, conversation, conversation.turns, len(turn.calls), f"error: {turn.fault}"))
        for number, call in enumerate(turn.calls):
            self.tools.call(call, partial(self._take, key, conversation, conversation.turns, number))
        return None

    def _take(self, key: int, conversation: _Conversation, turn: int, number: int, text: str) -> None:
        self._results.put((key, conversation, turn, number, text))

    def _turn(self, turn_ids: list[int]) -> Turn:
        # The formats of some models need special tokens, but none needs the one that ends the turn.
        spoken = turn_ids[:-1] if turn_ids[-1] in self._stop_ids else turn_ids
        return self._read(self._tokenizer.decode(spoken, skip_special_tokens=False))

    def answers(self, patience_s: float) -> list[tuple[int, list[int] | None]]:
        """See `Turns`."""
        ready: list[tuple[int, list[int] | None]] = []
        while True:
            try:
                if patience_s and not ready:
                    start_s = time.perf_counter()
                    try:
                        key, conversation, turn, number, text = self._results.get(timeout=patience_s)
                    finally:
                        self._waited_s += time.perf_counter() - start_s
                else:
                    key, conversation, turn, number, text = self._results.get_nowait()
            except queue.Empty:
                return ready
            if self._under_way.get(key) is not conversation or conversation.turns != turn:
                continue  # of a rollout that was given up
            conversation.results[number] = text
            if len(conversation.results) == len(conversation.calls):
                ready.append((key, self._answer(conversation)))

    def _answer(self, conversation: _Conversation) -> list[int]:
        """The tokens of all results of a turn, cut to what `max_tool_tokens` leaves for each."""
        names = [call.name for call in conversation.calls]
        results = [conversation.results[number] for number in range(len(names))]
        room = self._config.max_tool_tokens - self._frame(conversation.last, tuple(names))
        cut = [self._cut(text, max(0, room // len(names))) for text in results]
        messages = [tool_message(k, name, text) for k, (name, text) in enumerate(zip(names, cut, strict=True))]
        conversation.messages += messages
        return self._between.ids(conversation.last, messages)

    def _frame(self, last: int, names: tuple[str, ...]) -> int:
        """Tokens of the template around the results of these tools."""
        if (last, names) not in self._frames:
            empty = [tool_message(k, name, "") for k, name in enumerate(names)]
            self._frames[last, names] = len(self._between.ids(last, empty))
        return self._frames[last, names]

    def _cut(self, text: str, tokens: int) -> str:
        short = text[: tokens * _LETTERS_OF_A_TOKEN]
        ids = self._tokenizer(short, add_special_tokens=False)["input_ids"]
        if len(ids) <= tokens and len(short) == len(text):
            return text
        kept: str = self._tokenizer.decode(ids[:tokens])
        return kept

    def finished(self, key: int, completion: Completion) -> Completion:
        """See `Turns`."""
        conversation = self._under_way.pop(key, _Conversation())
        return replace(completion, messages=(*conversation.messages, assistant_message(completion.text, [])))

    def numbers(self) -> Numbers:
        """What happened since `begin`, or the last call of this, by metric."""
        waited_s, self._waited_s = self._waited_s, 0.0
        return {**self.tools.numbers(), "time/tool_wait_s": (waited_s, 1)}


def conversations_of(config: TrainConfig, tokenizer: Any, ends: tuple[int, ...]) -> Conversations | None:
    """What answers the turns of completions that `ends` end; None without `rollout.tools`. Raises UserError where the
    tools, or the tokenizer, cannot be used."""
    rollout, data = config.rollout, config.data
    if not rollout.tools:
        return None
    refuse(
        tokenizer.chat_template is None or data.chat_template == "never",
        "rollout.tools are called in chats: take a policy.model whose tokenizer has a chat template that knows tools,"
        " and data.chat_template auto or always",
    )
    tools = Tools(rollout, config.scoring)
    return Conversations(tools, rollout, tokenizer, data.chat_template_kwargs, ends)


def with_tools(data: DataConfig, conversations: Conversations | None) -> DataConfig:
    """The settings of data whose prompts tell the model of its tools, and are all chats."""
    if conversations is None:
        return data
    variables = {**data.chat_template_kwargs, "tools": conversations.tools.schemas}
    return replace(data, chat_template="always", chat_template_kwargs=variables)
