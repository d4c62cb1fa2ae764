"""Tokenizes chats that contain untrusted text, such as prompts and the results of tools.

A chat template writes control tokens, which begin and end turns, around the texts of messages. If a text contains the
name of a control token, that name must not become the token: the text could end its own message and forge the next one.
Ordinary text gets the same tokens as if the whole chat were tokenized at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

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
