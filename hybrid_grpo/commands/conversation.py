"""A conversation in the terminal, turned into the prompt for the next answer, by chat template or as plain text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.completion import Message, whole_characters
from hybrid_grpo.data.pictures import ImageStore
from hybrid_grpo.data.prompts import check_template_kwargs, read_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Content = str | list[dict[str, str]]
"""What a message says: text, or parts of which some are pictures."""


class ChatHistory:
    """The messages and answers so far. Of the data settings, only those of the chat template are used.

    Without a template the model continues plain text, in which each message begins a new line and its answer follows
    directly.

    Args:
        room: maximum length of the prompt, in tokens.
        album: takes pictures; None if the model sees none.

    Attributes:
        turns: messages with their answers, oldest first.
        pictures: paths of pictures that the next message will show.
    """

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, room: int, album: ImageStore | None = None
    ) -> None:
        self.turns: list[tuple[Content, str]] = []
        self.pictures: list[str] = []
        self._album = album
        self.templated = tokenizer.chat_template is not None and config.chat_template != "never"
        self._tokenizer, self._room = tokenizer, room
        self._system: str | None = None
        if self.templated:
            check_template_kwargs(config.chat_template_kwargs, tokenizer)
            self._config = DataConfig(chat_template_kwargs=config.chat_template_kwargs, max_prompt_tokens=room)
        else:
            self._config = DataConfig(chat_template="never", max_prompt_tokens=room)

    def instruct(self, text: str | None) -> None:
        """Set the system prompt. Raises UserError without a chat template."""
        refuse(
            text is not None and not self.templated,
            "a system prompt (chat.system) needs a chat template, and this model continues plain text: leave it out",
        )
        self._system = text

    def show(self, path: str) -> None:
        """Show a picture with the next message. Raises UserError if the model sees none, or the file is no picture."""
        refuse(
            self._album is None or not self.templated,
            "/image: policy.model sees no pictures: take a model that does, with a chat template",
        )
        assert self._album is not None
        whole = str(Path(path).expanduser().resolve())
        self._album.read([whole], None, "/image", self._config)
        self.pictures.append(whole)

    def said(self, message: str) -> Content:
        """Return what a message says, with the pictures that it shows."""
        images = [{"type": "image", "image": path} for path in self.pictures]
        return [*images, {"type": "text", "text": message}] if images else message

    def prompt_ids(self, message: Content) -> tuple[list[int], int]:
        """The prompt tokens for the next answer, and the number of oldest turns that were left out to stay within
        `room`. Raises UserError if the message alone is too long, or the template refuses it."""
        for left_out in range(len(self.turns) + 1):
            row = {"prompt": self._prompt(self.turns[left_out:], message)}
            seen = None if self._album is None else (self._album, None)
            token_ids = read_prompt(0, row, "the conversation", self._config, self._tokenizer, seen).token_ids
            if len(token_ids) <= self._room:
                return token_ids, left_out
        raise UserError(
            f"the message is too long: with rollout.max_completion_tokens for the answer, the model has room for"
            f" {self._room} tokens: shorten it, or lower rollout.max_completion_tokens"
        )

    def row(self) -> dict[str, Any]:
        """The conversation as a row of a data set; the last answer is its completion."""
        *before, (message, answer) = self.turns
        return {"prompt": self._prompt(before, message), "completion": answer}

    def _prompt(self, turns: list[tuple[Content, str]], message: Content) -> str | list[Message]:
        if not self.templated:
            return "\n".join([*(f"{said}{answer}" for said, answer in turns), str(message)])
        chat: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        for said, answer in turns:
            chat += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        return [*chat, {"role": "user", "content": message}]


class TextStream:
    """The `text` of `tokens` that are added one by one, without a last character that is incomplete."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode, self.text = decode, ""
        self.tokens: list[int] = []

    def add(self, token: int) -> str:
        """Add a token, and return the characters that it completes."""
        # All tokens are decoded together, since some tokenizers drop a space at the start of a text.
        self.tokens.append(token)
        before, self.text = self.text, whole_characters(self._decode(self.tokens))
        return self.text[len(before) :]
