r"""The notation of answers: one spelling for what can be written in several ways, and splitting outside of brackets."""

import re
from itertools import accumulate
from pathlib import Path

import yaml

LONGEST = 500
"""Characters of an answer that is read as mathematics; longer answers are compared as words."""

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_BEFORE, _AFTER = (
    [(re.compile(pattern), replacement) for pattern, replacement in TABLE[steps]] for steps in ("before", "after")
)
_SIGN = re.compile(r"\\\\|\\[A-Za-z]+|\\?[^\sA-Za-z0-9]")
_OPENING, _CLOSED = "([{⦃", ")]}⦄"


def clean(text: str) -> str:
    r"""The text in the notation of notation.yaml: no spacing and no `$`, one sign for each operation. Commands such as
    \frac and \text{} stay; `⦃` and `⦄` stand for the braces of sets."""
    text = text[: 4 * LONGEST].strip(" \t\n*`")
    if text.replace(r"\$", "").count("$") % 2:  # a $ without a partner is money
        text = re.sub(r"(?<!\\)\$(?=\s*-?[\d.])", r"\\$", text)
    for pattern, replacement in _BEFORE:
        text = pattern.sub(replacement, text)
    text = _SIGN.sub(lambda match: TABLE["signs"].get(match[0], match[0]), text)
    for pattern, replacement in _AFTER:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".,;:").strip()


def bare(text: str) -> str:
    r"""Remove \text{} and doubled spaces."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    return re.sub(r"\s+", " ", text).strip(' "').rstrip(" .,")


def words(text: str) -> str:
    """A form for comparing as words: words of three letters and more in lower case, all else without extra spaces."""
    text = bare(text)
    if re.fullmatch(r"[A-Za-z][A-Za-z .,'-]*", text) and re.search(r"[A-Za-z]{3}|^no$", text, re.IGNORECASE):
        return text.casefold()
    return re.sub(r"(?<!\w) | (?!\w)", "", text)


def outside(text: str) -> str:
    """The text with everything in brackets replaced by spaces; the kinds of a pair may differ, as in [0, 1)."""
    kept, depth = [], 0
    for character in text:
        depth -= character in _CLOSED
        kept.append(character if depth == 0 else " ")
        depth += character in _OPENING
    return "".join(kept)


def wrapped(text: str) -> bool:
    """Whether one pair of brackets stands around the whole text."""
    return text[0] in _OPENING and text[-1] in _CLOSED and not outside(text)[1:-1].strip()


def nesting(text: str) -> int:
    """Number of brackets inside each other."""
    return max(accumulate((character in _OPENING) - (character in _CLOSED) for character in text), default=0)


def split(text: str, separator: str) -> list[str]:
    """Split the text at the matches of a pattern that stand outside of all brackets."""
    parts, begin = [], 0
    for match in re.finditer(separator, outside(text)):
        parts.append(text[begin : match.start()])
        begin = match.end()
    return [*parts, text[begin:]]
