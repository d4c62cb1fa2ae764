r"""The notation of answers: one spelling for what can be written in several ways, and splitting outside of brackets."""

from __future__ import annotations

import re

LONGEST = 500
"""Characters of an answer that is read as mathematics; longer answers are compared as words."""

_SYMBOLS = {
    "\u2212": "-", "\u2013": "-", "\u00d7": "*", "\u222a": "⊔", "·": "*", "÷": "/", "√": r"\sqrt", "≤": "<=", "≥": ">=",
    "²": "^2", "³": "^3", "\u00a0": " ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "θ": r"\theta",
    "∅": "⦃⦄", r"\{": "⦃", r"\}": "⦄", r"\%": "%", r"\lbrace": "⦃", r"\rbrace": "⦄",
}  # fmt: skip
_COMMANDS = {
    "pi": "π", "infty": "∞", "infinity": "∞", "cup": "⊔", "in": "∈", "pm": "±", "mp": "∓", "cdot": "*", "times": "*",
    "div": "/", "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "lt": "<",
    "gt": ">", "ne": "≠", "neq": "≠", "approx": "≈", "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac",
    "dbinom": r"\binom", "tbinom": r"\binom", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "langle": "(",
    "rangle": ")", "emptyset": "⦃⦄", "varnothing": "⦃⦄", "degree": "°", "circ": "°", "colon": ":", "prime": "'",
    "quad": " ", "qquad": " ", "displaystyle": "", "textstyle": "", "limits": "", "left": "", "right": "", "big": "",
    "Big": "", "bigl": "", "bigr": "", "Bigl": "", "Bigr": "", "lbrack": "[", "rbrack": "]", "pounds": "", "euro": "",
    "lor": " or ", "vee": " or ", "land": " and ", "wedge": " and ",
}  # fmt: skip
_COMMAND = re.compile(r"\\\\|\\([A-Za-z]+)")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname|boldsymbol|bm)\*?\s*\{")
_REALS = re.compile(r"\\mathbb\s*\{?R\}?|\\(?:R|Reals)(?![A-Za-z])|(?:\\text\{)?\s*all real (?:numbers|values)\s*\}?")
_DOLLARS = re.compile(r"\\\$\s*(-?\s*(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)(?![\d.,]*\d|\s*[\\/^*A-Za-z]))?")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d]|,\d)")
_LARGE_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LARGE = re.compile(rf"(?<=[\d}}])\s*(\\text\{{)?\s*({'|'.join(_LARGE_POWERS)})\b")
_UNEQUAL = re.compile(r"(?:(?<=[A-Za-z])|(?<=\s))!=|\\not\s*=")  # 5!=120 has a factorial
_OPENING, _CLOSED = "([{⦃", ")]}⦄"


def clean(text: str) -> str:
    r"""The text in one notation: without spacing, sizes of brackets and `$`, with one sign for each operation.

    Commands such as \frac, \sqrt and \text{} stay; `⦃` and `⦄` stand for the braces of sets.
    """
    text = _UNEQUAL.sub("≠", text[: 4 * LONGEST].strip(" \t\n*`"))
    text = _dollars(re.sub(r"\\!\s*", "", text).replace("{,}", ","))
    text = re.sub(r"\\\\\s*\[[^\]]*\]", r"\\\\", text)  # the row distance of a matrix
    text = re.sub(r"(?<!\\)\\[()\[\]]|\{\}", "", text)
    text = re.sub(r"(?<![\w)])\*\*|\*\*(?![\w(])", "", text).replace("**", "^")  # bold, or a power
    text = _LARGE.sub(lambda match: f"*10^{{{_LARGE_POWERS[match[2]]}}}{match[1] or ''}", text)
    text = re.sub(r"(?<=\d)[eE]([-+]?\d+)(?![\d_A-Za-z])", r"*10^{\1}", text)
    text = re.sub(r"(?<=\d)(?:(?<!\\)\\[, ]|~| )(?=\d{3}(?!\d|\s*/))", "", text)
    text = re.sub(r"(?<!\\)\\[,;:> ]|(?<!\\)~|\s+", " ", text)
    for symbol, plain in _SYMBOLS.items():
        text = text.replace(symbol, plain)
    text = _TEXT.sub(r"\\text{", text)
    text = _REALS.sub("(-∞,∞)", text)
    text = re.sub(r"\\(?:left|right)\s*\.", "", text)
    text = _COMMAND.sub(lambda match: _COMMANDS.get(match[1] or "", match[0]), text)
    text = re.sub(r"\^\s*(?:°|\{\s*°\s*\})|(?:\\text\{\s*|\b|(?<=\d))degrees?\b\s*\}?(?! *[CF]\b)", "°", text)
    text = re.sub(r"\s*(?:\\text\{\s*|(?<=[\d ]))per\s?cent\s*\}?", "%", text)
    return text.strip().rstrip(".,;:").strip()


def _dollars(text: str) -> str:
    r"""Remove the `$` of mathematics; a `$` of money (`\$`, or one without a partner) becomes a unit."""
    if text.replace(r"\$", "").count("$") % 2:
        text = re.sub(r"(?<!\\)\$(?=\s*-?[\d.])", r"\\$", text)
    text = re.sub(r"(?<!\\)\$", "", text)
    text = _DOLLARS.sub(lambda match: match[1] + r"\text{ dollars}" if match[1] else "", text)
    return re.sub(r"[€£¥]", "", text)


def without_thousands(text: str) -> str:
    """Write 1,000 as 1000, unless the text has brackets: (1,000) is a point."""
    return text if re.search(r"[(\[⦃]", text) else _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


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


def closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, or -1; the kinds may differ, as in [0, 1)."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] in _OPENING) - (text[at] in _CLOSED)
        if depth == 0:
            return at
    return -1


def split(text: str, separator: str) -> list[str]:
    """Split the text at the matches of a pattern that stand outside of all brackets."""
    parts, begin, depth, at = [], 0, 0, 0
    pattern = re.compile(separator)
    while at < len(text):
        match = pattern.match(text, at) if depth == 0 else None
        if match and match.end() > at:
            parts.append(text[begin:at])
            begin = at = match.end()
            continue
        depth += (text[at] in _OPENING) - (text[at] in _CLOSED)
        at += 1
    return [*parts, text[begin:]]


def outside(text: str) -> str:
    """The text with everything in brackets replaced by spaces."""
    kept, depth = [], 0
    for character in text:
        depth -= character in _CLOSED
        kept.append(character if depth == 0 else " ")
        depth += character in _OPENING
    return "".join(kept)
