"""Faults of a single row: wrongly decoded characters, and missing answers."""

import re
import unicodedata
from typing import Any

from hybrid_grpo.data.overlap import normalized

_STAND_INS = {"nan", "none", "null", "n/a", "na", "#n/a", "tbd", "todo", "unknown", "undefined", "?", "-", "...", "…"}
_OPEN_BOX = re.compile(r"\\boxed\s*(\{\s*\}|\s*$|\{[^{}]*$)")


def encoding_fault(text: str) -> str | None:
    """What is wrong with the characters in a text, as part of a message; None if nothing is wrong."""
    import ftfy

    if "\ufffd" in text:
        return "has U+FFFD, which stands for a letter that could not be decoded"
    for letter in set(text):
        kind = unicodedata.category(letter)
        if kind == "Cs":
            return f"has half of a surrogate pair, U+{ord(letter):04X}"
        if kind == "Cc" and letter not in "\t\n\r":
            return f"has the control character U+{ord(letter):04X}"
    if not text.isascii() and ftfy.is_bad(text):
        return f"was decoded with a wrong encoding: it is likely to have been {ftfy.fix_encoding(text)!r:.60}"
    return None


def answer_fault(answer: Any) -> str | None:
    """What is wrong with an answer, as part of a message; None if nothing is wrong. A value that is not text is
    only a fault if it is missing, empty or NaN."""
    if answer is None or answer != answer:
        return "is missing"
    if not isinstance(answer, str):
        return "is empty" if isinstance(answer, list | dict) and not answer else None
    text = normalized(answer)
    if not text:
        return "is empty"
    if text in _STAND_INS:
        return f"is {answer!r}, which stands for none"
    if "####" in text and not text.rpartition("####")[2].strip():
        return 'has nothing after its "####"'
    if _OPEN_BOX.search(text):
        return r"has nothing in its \boxed{}, or does not close it"
    return None
