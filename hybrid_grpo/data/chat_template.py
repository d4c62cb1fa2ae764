"""Writes chats as text with a tokenizer's chat template, in the form of content that the template reads."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal

from hybrid_grpo.data.completion import Message

_TEXT_PARTS = (None, "text", "input_text", "output_text")


def apply_template(tokenizer: Any, chat: list[Message], *, generation: bool = True, **variables: Any) -> str:
    """Render a chat as text with the tokenizer's template; with `generation`, the text ends where the model's turn
    begins or, after a message of the assistant, where that message ends. Raises any error of the template."""
    continued = generation and chat[-1]["role"] == "assistant"
    return _rendered(
        tokenizer,
        formed(tokenizer, chat),
        add_generation_prompt=generation and not continued,
        continue_final_message=continued,
        **variables,
    )


def _rendered(tokenizer: Any, chat: list[Message], **variables: Any) -> str:
    # The template writes the special tokens itself; transformers adds none.
    text: str = tokenizer.apply_chat_template(chat, tokenize=False, **variables)
    return text


def formed(tokenizer: Any, chat: list[Message]) -> list[Message]:
    """Return a chat in the form of contents that the template reads. Raises ValueError if it leaves out a part."""
    template = str(tokenizer.chat_template)
    form = _form(tokenizer, template)

    def in_form(content: Any) -> Any:
        if form == "parts" and isinstance(content, str):
            return _part(content)
        if form == "text" and isinstance(content, list):
            return joined(content)
        return [_known(part, template) for part in content] if isinstance(content, list) else content

    return [
        {**message, "content": in_form(message["content"])} if "content" in message else message for message in chat
    ]


def _known(part: Any, template: str) -> Any:
    if isinstance(part, dict) and (part.get("type") in ("text", "image") or str(part.get("type")) in template):
        return part
    return _part(joined([part]))[0]


def joined(parts: list[Any]) -> str:
    """Return the text of a content whose parts are text. Raises ValueError if it has other parts."""
    for part in parts:
        if not isinstance(part, str) and (part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str)):
            raise ValueError(
                f"a content has a part of type {part.get('type')}, which it does not read: give text, or take a model"
                " whose template reads such parts"
            )
    return "".join(part if isinstance(part, str) else part["text"] for part in parts)


def _part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@lru_cache(maxsize=4)
def _form(tokenizer: Any, _: str) -> Literal["text", "parts", "both"]:
    """Return the form of content that a template writes. Templates such as those of Idefics 3 and SmolVLM leave out
    content that is not a list of parts; many others write such a list as Python does."""

    def shows(content: Any) -> bool:
        with suppress(Exception):  # it is reported where the template is applied
            written = _rendered(tokenizer, [{"role": "user", "content": content}])
            return "hello" in written and not re.search(r"['\"]type['\"]\s*:", written)
        return False

    text, parts = shows("hello"), shows(_part("hello"))
    return "both" if text == parts else "text" if text else "parts"
