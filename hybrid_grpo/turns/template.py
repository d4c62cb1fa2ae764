"""Finds the tokens between two turns: what the chat template writes after a turn of the model, up to the next turn."""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.chat_template import ChatText, apply_template, clean, unmarked
from hybrid_grpo.data.completion import Message
from hybrid_grpo.data.episodes import PLACE, Observation
from hybrid_grpo.data.picture import Picture
from hybrid_grpo.data.pictures import ImageStore, bared, parted
from hybrid_grpo.data.prompts import TRUSTED
from hybrid_grpo.turns.calls import ToolCall
from hybrid_grpo.turns.observations import error_text

_MARK = "qzx7k"
"""A marker in the model's turn, by which the turn is found in the chat that the template writes."""
_THOUGHT = "kx7zq"
"""A marker in the model's thinking, by which the thinking is found."""


def assistant_message(content: str, calls: list[ToolCall]) -> Message:
    """Return a turn of the model as a message."""
    message: Message = {"role": "assistant", "content": clean(content)}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": _id(k, call.id), "function": {"name": call.name, "arguments": call.arguments}}
            for k, call in enumerate(calls)
        ]
    return message


def tool_message(number: int, name: str, said: str | Observation, id: str | None = None) -> Message:
    """Return the result of call `number` of a turn as a message. `id` is the model's id of the call, if it gave one."""
    return {"role": "tool", "name": name, "tool_call_id": _id(number, id), "content": _content(said)}


def user_message(said: str | Observation) -> Message:
    """Return a message of the user, such as an answer to a turn without calls."""
    return {"role": "user", "content": _content(said)}


def _content(said: str | Observation) -> str | list[dict[str, Any]]:
    if isinstance(said, str) or not said.pictures:
        return clean(said if isinstance(said, str) else said.text)
    images = [{"type": "image", "image": picture} for picture in said.pictures]
    return parted(map(clean, said.text.split(PLACE)), images)


def _id(number: int, id: str | None) -> str:
    return id or f"call{number:05d}"


def written(
    tokenizer: Any, chat: list[Message], schemas: Sequence[dict[str, Any]], variables: dict[str, Any], *,
    generation: bool = True,
) -> str:  # fmt: skip
    """Return a chat as the template writes it; with `generation`, including the beginning of the model's next turn."""

    def by(chat: list[Message]) -> str:
        return apply_template(tokenizer, chat, generation=generation, tools=list(schemas) or None, **variables)

    try:
        return by(chat)
    except Exception:
        # Some templates, such as DeepSeek's, accept the arguments of calls only as JSON text.
        return by([_with_json(message) for message in chat])


def _with_json(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [{**function, "arguments": json.dumps(function["arguments"])} for function in functions]
    calls = zip(message["tool_calls"], texts, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in calls]}


_LETTERS_OF_A_TOKEN = 32
"""Characters of an answer that are tokenized for each token to be kept. The rest is dropped without being tokenized."""


def cut(tokenizer: Any, chat_text: ChatText, text: str, tokens: int) -> str:
    """Return the beginning of a text, at most `tokens` tokens long."""
    short = text[: tokens * _LETTERS_OF_A_TOKEN]
    ids = chat_text.ids(chat_text.marked(short))
    if len(ids) <= tokens and len(short) == len(text):
        return text
    kept: str = tokenizer.decode(ids[:tokens])
    return kept


class TurnTemplate:
    """What the chat template of a tokenizer writes between turns, and around them.

    Args:
        variables: `data.chat_template_kwargs`, passed to the template along with the messages.
        schemas: JSON schemas of the tools; may be empty.
        stop_ids: tokens that end a turn.
        seen: takes pictures, and says which it takes; None if the model sees none.
    """

    def __init__(
        self, tokenizer: Any, variables: dict[str, Any], schemas: list[dict[str, Any]], stop_ids: tuple[int, ...],
        seen: tuple[ImageStore, DataConfig] | None = None,
    ) -> None:  # fmt: skip
        self._seen = seen
        self.tokenizer, self.variables, self.schemas = tokenizer, variables, schemas
        self.ends: dict[int, str] = {token: tokenizer.convert_ids_to_tokens(token) for token in stop_ids}
        """The texts of the tokens that end a turn."""
        self._text = ChatText(tokenizer, str(tokenizer.get_chat_template()))

    @property
    def _sight(self) -> tuple[ImageStore, DataConfig]:
        assert self._seen is not None, "whoever shows pictures needs a model that sees"
        return self._seen

    def read(self, files: Sequence[bytes], where: str) -> list[Picture]:
        """Take the pictures of an answer, which are kept as long as what is returned. Raises UserError as
        `ImageStore.read` does; `where` describes the answer."""
        if not files:
            return []
        album, data = self._sight
        return album.read(files, None, where, data, keep=False)

    def cut(self, message: Message, tokens: int, pictures: Sequence[Picture]) -> Message:
        """Return the beginning of a message, at most `tokens` tokens; text says so where pictures have no room."""
        shorten, content = partial(cut, self.tokenizer, self._text), message["content"]
        if isinstance(content, str):
            return {**message, "content": shorten(content, tokens)}
        bare = {**message, "content": [part for part in content if part["type"] != "text"]}
        # The template writes more than the pictures themselves.
        needed = len(self.ids(-1, [bare], pictures)) - len(self.ids(-1, [{**message, "content": ""}]))
        if needed > tokens:
            why = error_text(f"pictures of {needed} tokens, and {tokens} may be shown: ask for smaller ones")
            return {**message, "content": shorten(why, tokens)}
        parts, room = [], tokens - needed
        for part in content:
            if part["type"] == "text":
                part = {**part, "text": shorten(part["text"], room)}
                room -= len(self._text.ids(self._text.marked(part["text"])))
            parts.append(part)
        return {**message, "content": parts}

    def check_pictures(self, setting: str, example: Callable[[Observation], Message]) -> None:
        """Raise UserError, which names `setting`, if the template has no place for pictures in what `example` makes."""
        message, _ = bared(example(Observation(f"{_MARK}{PLACE}", (b"",))))
        after = self._after_if_written([message])
        said = "a tool's result" if message["role"] == "tool" else "an answer of the user"
        refuse(
            len(unmarked(self._sight[0].processor.image_token).findall(after)) != 1,
            f"{setting} shows pictures, and the chat template of policy.model has no place for them in {said}: take a"
            " model whose template has, or give the tokenizer another template",
        )

    def check(self, setting: str, example: Callable[[str], Message]) -> None:
        """Raise UserError, which names `setting`, if the template has no place for messages that `example` makes, or
        does not end the turn that they answer."""
        message = example(f"{_MARK} {_MARK}")
        of_tool = message["role"] == "tool"
        turn, said = ("a call of a tool", "its result") if of_tool else ("a turn", "the user's answer to it")
        try:
            found, after = self._after([message])
        except Exception as error:  # a template is a program of the model's authors
            found, after = False, ""
            why = f"refuses {turn} and {said}: {error}"
        else:
            unended = "a turn that calls a tool" if of_tool else "a turn"
            why = f"leaves out {turn}, or {said}" if found else f"does not end {unended}"
        refuse(
            not found or _MARK not in after,
            f"{setting}: the chat template of policy.model {why}: take a model whose template has"
            f" {'tools' if of_tool else 'several turns'}, or give the tokenizer another template",
        )

    def takes_several(self) -> bool:
        """Whether the template has a place for the results of two calls of a turn."""
        results = [tool_message(number, self.schemas[0]["function"]["name"], _MARK) for number in range(2)]
        return self._after_if_written(results).count(_MARK) == len(results)

    def check_history(self, setting: str, example: Callable[[str], Message]) -> None:
        """Raise UserError, which names `setting`, if the template rewrites earlier turns: in training, the model reads
        its turns as it wrote them, and would later read something else in chats that the template writes.

        The check writes a chat of two turns, each answered by a message that `example` makes. After every turn, the
        text must begin with the previous text and the new turn, including its thinking, apart from white space.
        Thinking may be part of the content, or have a field of its own (`reasoning_content`).
        """
        found = [self._rewriting(example, separate=separate) for separate in (False, True)]
        refuse(
            None not in found,
            f"{setting}: the chat template of policy.model {found[1]}, while the model continues to read its turns"
            " as it wrote them: set rollout.keep_history true to train so, or give a template that keeps them",
        )

    def _rewriting(self, example: Callable[[str], Message], *, separate: bool) -> str | None:
        """Return what the template does to earlier turns, as a message; None if it keeps them."""
        found = re.search(r"<([\w:]*think\w*)>", str(self.tokenizer.get_chat_template()))
        begin, end = (found[0], f"</{found[1]}>") if found else ("", "")
        chat: list[Message] = [{"role": "user", "content": "."}]
        before = _squeezed(self._written(chat))
        for turn in (1, 2):
            answer, thought = example(_MARK), ""
            # A template may have begun the model's thinking, or ended it.
            if begin and not before.endswith(end):
                thought = f"{'' if before.endswith(begin) else begin}{_THOUGHT}{end}"
            calls = [ToolCall(answer["name"], {"about": _MARK})] if answer["role"] == "tool" else []
            content = "" if calls else _MARK
            chat.append(assistant_message(content if separate else thought + content, calls))
            if separate and thought:
                chat[-1]["reasoning_content"] = _THOUGHT
            chat.append(answer)
            try:
                written = _squeezed(self._written(chat))
            except Exception as error:  # a template is a program of the model's authors
                return f"refuses several turns: {error}"
            if thought and written.count(_THOUGHT) < turn:
                return "drops the thinking of earlier turns"
            if not written.startswith(before + thought + content):
                return "writes earlier turns anew"
            before = written
        return None

    def ids(self, last: int, messages: list[Message], pictures: Sequence[Picture] = ()) -> list[int]:
        """Return the tokens of messages, with these pictures, that answer a turn; `last` is its last sampled token."""
        _, after = self._after(messages)
        end = next((text for text in self.ends.values() if after.startswith(text)), "")
        # If the model sampled the template's end of the turn, it is there already.
        return self._tokens(after.removeprefix(end) if self.ends.get(last) == end else after, pictures)

    def whole(self, chat: list[Message], pictures: Sequence[Picture] = ()) -> list[int]:
        """Return the tokens of a chat, with these pictures, and of the beginning of the model's next turn."""
        marked = [m if m["role"] in TRUSTED else {**m, "content": self._text.marked(m["content"])} for m in chat]
        return self._tokens(self._written(marked), pictures)

    def _tokens(self, text: str, pictures: Sequence[Picture]) -> list[int]:
        encode = self._text.ids
        return self._sight[0].ids(text, pictures, encode, "the chat") if pictures else encode(text)

    def _after_if_written(self, messages: list[Message]) -> str:
        """Return the text of `_after`; empty if the template refuses the messages."""
        with suppress(Exception):  # a template is a program of the model's authors
            return self._after(messages)[1]
        return ""

    def _after(self, messages: list[Message]) -> tuple[bool, str]:
        """Return whether a chat has the end of the turn before `messages`, its last, and its text from there on."""
        answered = [message for message in messages if message["role"] == "tool"]
        calls = [ToolCall(message["name"], {"about": _MARK}, message["tool_call_id"]) for message in answered]
        marked = self._text.marked(messages)
        chat = [{"role": "user", "content": "."}, assistant_message("" if calls else _MARK, calls), *marked]
        text = self._written(chat)
        # The end of the turn follows its content, or the arguments of its last call.
        first = text.find(_MARK)
        for _ in calls[1:]:
            first = text.find(_MARK, first + 1)
        ends = [place for end in self.ends.values() if first >= 0 and (place := text.find(end, first)) >= 0]
        return bool(ends), text[min(ends) :] if ends else ""

    def _written(self, chat: list[Message]) -> str:
        return written(self.tokenizer, chat, self.schemas, self.variables)


def _squeezed(text: str) -> str:
    """Return the text without white space, which templates trim as they like."""
    return "".join(text.split())
