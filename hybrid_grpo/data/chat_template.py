"""Writes chats as text with a tokenizer's chat template, and as tokens where texts in them are not trusted.

A chat template writes control tokens, which begin and end turns, around the texts of messages. If a text contains the
name of a control token, that name must not become the token: the text could end its own message and forge the next one.
Ordinary text gets the same tokens as if the whole chat were tokenized at once.
"""

import re
from collections.abc import Collection, Mapping, Sequence
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
        tokenizer, formed(tokenizer, chat), add_generation_prompt=generation and not continued,
        continue_final_message=continued, **variables,
    )  # fmt: skip


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


_BEGIN, _END = "\U000f0000", "\U000f0001"
"""Private-use characters that enclose a marked name."""
_PIECES = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}|[{_BEGIN}{_END}]")


def clean(text: str) -> str:
    """Replace each half of a surrogate pair, which tokenizers refuse and files cannot hold, by `?`."""
    return text.encode(errors="replace").decode()


def unmarked(name: str) -> re.Pattern[str]:
    """Return a pattern of a control token's name where it stands for the token."""
    return re.compile(f"(?<!{_BEGIN}){re.escape(name)}")


class ChatText:
    """Marks the names of control tokens in texts before a chat template sees them, and tokenizes its output. Control
    tokens are the special tokens, and any other added tokens that occur in `template`."""

    def __init__(self, tokenizer: Any, template: str = "") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        names = [token.content for token in added if token.special or token.content in template]
        longest_first = sorted((name for name in names if name.strip()), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def marked(self, value: Any) -> Any:
        """Return a text, or lists and dictionaries with all their texts, with the names of control tokens marked."""
        if isinstance(value, str):
            text = value.replace(_BEGIN, "").replace(_END, "")
            return self._control.sub(lambda found: f"{_BEGIN}{found[0]}{_END}", text)
        if isinstance(value, Mapping):
            return {name: self.marked(part) for name, part in value.items()}
        if isinstance(value, Sequence):
            return [self.marked(part) for part in value]
        return value

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, in which marked names of control tokens are treated as ordinary text."""
        # Texts between marked names have even indices; an unpaired mark also splits.
        pieces = _PIECES.split(text)
        ids = self._encoded(pieces[0])
        for index, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += self._spelled(piece) if index % 2 else self._continued(piece)
        return ids

    def _spelled(self, name: str) -> list[int]:
        ids = self._continued(name, split_special_tokens=True)
        if len(name) == 1 or self._tokenizer.convert_tokens_to_ids(name) not in ids:
            return ids
        # Tokenizers do not split added tokens that are not special.
        return self._continued(name[:1]) + self._continued(name[1:])

    def _continued(self, text: str, **options: Any) -> list[int]:
        """Return the tokens of a text that follows another, since some tokenizers put a space before the first text."""
        line, ids = self._encoded("\n"), self._encoded(f"\n{text}", **options)
        return ids[len(line) :] if ids[: len(line)] == line else self._encoded(text, **options)

    def _encoded(self, text: str, **options: Any) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"]
        return list(ids)


@lru_cache(maxsize=4)
def _prompt_text(tokenizer: Any, _: int) -> ChatText:
    return ChatText(tokenizer)


def prompt_text_of(tokenizer: Any) -> ChatText:
    """A `ChatText` for prompts. They may mention `<think>` and the like, so only special tokens are control tokens."""
    return _prompt_text(tokenizer, len(tokenizer))
