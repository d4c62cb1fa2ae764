"""Special tokens at the ends of texts: those that a tokenizer adds, and the one that ends a completion."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any


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
