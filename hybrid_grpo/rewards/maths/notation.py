r"""Normalizes the notation of answers, and splits answers at separators that are outside of brackets."""

import re
from itertools import accumulate
from pathlib import Path

import yaml

LONGEST = 500
"""Maximum length in characters of an answer that is parsed; longer answers are only compared as words."""

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_BEFORE, _AFTER = (
    [(re.compile(pattern), replacement) for pattern, replacement in TABLE[steps]] for steps in ("before", "after")
)
_SIGN = re.compile(r"\\\\|\\[A-Za-z]+|\\?[^\sA-Za-z0-9]")
_OPENING, _CLOSED = "([{⦃", ")]}⦄"


def clean(text: str) -> str:
    r"""Normalize a text by the rules of notation.yaml: no `$`, no spacing commands, one sign for each operation.
    Commands such as \frac and \text{} are kept; `⦃` and `⦄` stand for the braces of sets."""
    text = text[: 4 * LONGEST].strip(" \t\n*`")
    if text.replace(r"\$", "").count("$") % 2:  # an unpaired $ is a currency sign
        text = re.sub(r"(?<!\\)\$(?=\s*-?[\d.])", r"\\$", text)
    for pattern, replacement in _BEFORE:
        text = pattern.sub(replacement, text)
    text = _SIGN.sub(lambda match: TABLE["signs"].get(match[0], match[0]), text)
    for pattern, replacement in _AFTER:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".,;:").strip()


def bare(text: str) -> str:
    r"""Replace \text{...} with its content, and remove redundant spaces, quotes and final punctuation."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    return re.sub(r"\s+", " ", text).strip(' "').rstrip(" .,")


def words(text: str) -> str:
    """Return the form in which texts are compared: words of 3 or more letters in lower case, else no extra spaces."""
    text = bare(text)
    if re.fullmatch(r"[A-Za-z][A-Za-z .,'-]*", text) and re.search(r"[A-Za-z]{3}|^no$", text, re.IGNORECASE):
        return text.casefold()
    return re.sub(r"(?<!\w) | (?!\w)", "", text)


def outside(text: str) -> str:
    """Replace everything inside brackets with spaces; the kinds of the two brackets may differ, as in [0, 1)."""
    kept, depth = [], 0
    for character in text:
        depth -= character in _CLOSED
        kept.append(character if depth == 0 else " ")
        depth += character in _OPENING
    return "".join(kept)


def wrapped(text: str) -> bool:
    """Whether a single pair of brackets encloses the whole text."""
    return text[0] in _OPENING and text[-1] in _CLOSED and not outside(text)[1:-1].strip()


def nesting(text: str) -> int:
    """Return the greatest depth to which brackets are nested."""
    return max(accumulate((character in _OPENING) - (character in _CLOSED) for character in text), default=0)


def split(text: str, separator: str) -> list[str]:
    """Split the text at the matches of the pattern `separator` that are outside of all brackets."""
    parts, begin = [], 0
    for match in re.finditer(separator, outside(text)):
        parts.append(text[begin : match.start()])
        begin = match.end()
    return [*parts, text[begin:]]
