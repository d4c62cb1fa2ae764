r"""Numbers in text: where a completion states its answer, and which number that is.

Exact rationals throughout, so that 0.5, 1/2 and \frac{1}{2} are one number and 0.333 is not 1/3. This is no
computer algebra: an expression (2+3, \sqrt{4}, 1e3) is not a number here.
"""

from __future__ import annotations

import re
from fractions import Fraction

_CURRENCY = "[$€£¥]"
_SIGN = "[-+\u2212]"  # U+2212 is the minus sign of typeset text
_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_QUOTIENT = rf"(?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL}))?"

_WHOLE = re.compile(
    rf"(?:{_CURRENCY}?(?P<sign>{_SIGN})?|(?P<outer_sign>{_SIGN}){_CURRENCY})\s?{_QUOTIENT}"
    r"\s?%?(?:\s+(?!(?:and|or)\b)[A-Za-z][A-Za-z /.-]*)?"
)
# A sign after a digit, letter or bracket is a subtraction; digits next to '/', '.' or ',' are part of a date or list.
_INSIDE = re.compile(rf"(?:(?<![\w)\]])(?P<sign>{_SIGN}){_CURRENCY}?)?(?<![\w/.,]){_QUOTIENT}(?![\w/]|[.,][0-9])")
_LONGEST = 100  # characters of a number: int() refuses, and takes quadratic time for, runs of thousands of digits

_FRAC = re.compile(r"(?<![0-9])\\[dt]?frac\s?\{\s?(-?[0-9.,]+)\s?\}\s?\{\s?([0-9.,]+)\s?\}")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s?\{([^{}]*)\}")
_MARKER = re.compile(r"####|\\boxed\s?\{")


def parse_number(text: str) -> Fraction | None:
    r"""The number that `text` is, or None.

    Understood: signs, thousands commas, decimals, a/b and \frac{a}{b}, a currency sign, a percent sign (dropped:
    50% is 50), words of a unit after a space or in \text{}, LaTeX escapes and spacing, surrounding `$`, `*` or
    backquotes, a trailing period. Anything else in the text, above all a second number, makes it None.
    """
    if len(text) > _LONGEST:
        return None
    match = _WHOLE.fullmatch(_plain(text))
    return None if match is None else _value(match, match["sign"] or match["outer_sign"])


def stated_number(text: str, last_number: bool = False) -> Fraction | None:
    r"""The last number that `text` marks as its answer, by `####` (up to the end of the line) or `\boxed{}`.

    Marks that hold no number, such as a heading `#### Step 1`, are passed over. Where none holds one, and
    `last_number` is set, it is the last number anywhere in the text.
    """
    for content in reversed(_marked(text)):
        number = parse_number(content)
        if number is not None:
            return number
    if last_number:
        matches = [match for match in _INSIDE.finditer(text) if len(match[0]) <= _LONGEST]
        return _value(matches[-1], matches[-1]["sign"]) if matches else None
    return None


def _marked(text: str) -> list[str]:
    contents = []
    for match in _MARKER.finditer(text):
        rest = text[match.end() : match.end() + _LONGEST + 1]
        content = rest.partition("\n")[0] if match[0] == "####" else _until_closed(rest)
        if content is not None:
            contents.append(content)
    return contents


def _until_closed(text: str) -> str | None:
    """What stands before the brace that closes one opened before `text`; None if none does."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return None


def _plain(text: str) -> str:
    text = _TEXT.sub(r" \1", text)
    text = _FRAC.sub(r"\1/\2", text)
    text = text.replace("{,}", ",").replace(r"\!", "").replace(r"\$", "$").replace(r"\%", "%")
    text = re.sub(r"\\[,;: ]|~|\s", " ", text)
    return text.lstrip(" *`$").rstrip(" *`$.")


def _value(match: re.Match[str], sign: str | None) -> Fraction | None:
    top, bottom = (Fraction((match[part] or "1").replace(",", "").rstrip(".")) for part in ("top", "bottom"))
    if bottom == 0:
        return None
    return top / bottom if sign in (None, "+") else -top / bottom
