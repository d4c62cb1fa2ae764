r"""Plain numbers in text, without reading expressions.

Numbers are exact rationals, so that 0.5, 1/2 and \frac{1}{2} are one number and 0.333 is not 1/3. An expression (2+3,
\sqrt{4}, 1e3) is not a number here.
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


def last_number_in(text: str) -> Fraction | None:
    """The last number anywhere in a text, or None."""
    matches = [match for match in _INSIDE.finditer(text) if len(match[0]) <= _LONGEST]
    return _value(matches[-1], matches[-1]["sign"]) if matches else None


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
