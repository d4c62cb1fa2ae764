"""Writes chats as text with a tokenizer's chat template, in the form of content that the template reads."""

from __future__ import annotations

import re
from collections.abc import Collection
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


def text_ids(tokenizer: Any, text: str, *, ended: bool = False) -> list[int]:
    """Return the tokens of a text, after those that the tokenizer adds before a text, such as BOS, unless the text
    begins with them. If it is `ended`, those that the tokenizer adds after a text, such as EOS, follow likewise."""
    ids: list[int] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    before, after = _added(tokenizer, len(tokenizer))
    before = [] if ids[: len(before)] == before else before
    return [*before, *ids, *(after if ended and ids[-len(after) :] != after else [])]


@lru_cache(maxsize=4)
def _added(tokenizer: Any, _: int) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer's post-processor adds before and after a text."""
    bare, whole = (list(tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (False, True))
    places = range(len(whole) - len(bare) + 1)
    place = next((place for place in places if whole[place : place + len(bare)] == bare), 0)
    return whole[:place], whole[place + len(bare) :]


def ended_ids(tokenizer: Any, text: str, end: int, ends: Collection[int]) -> list[int]:
    """Return the tokens of a completion up to the token that ends it, one of `ends`; `end` is added if there is none.
    White space and special tokens after it are left out. End tokens that text follows end turns within it."""
    ids: list[int] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    place, known = len(ids), {end, *ends}
    while place and (
        ids[place - 1] in known or not tokenizer.decode(ids[place - 1 : place], skip_special_tokens=True).strip()
    ):
        place -= 1
    last = next((at for at in range(place, len(ids)) if ids[at] in known), None)
    return [*ids, end] if last is None else ids[: last + 1]
