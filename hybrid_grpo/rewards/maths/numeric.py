r"""Plain numbers in text, without reading expressions.

Numbers are exact rationals, so that 0.5, 1/2 and \frac{1}{2} are one number and 0.333 is not 1/3. An expression (2+3,
\sqrt{4}, 1e3) is not a number here.
"""

import re
from fractions import Fraction

from hybrid_grpo.rewards.maths.notation import bare, clean

_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_QUOTIENT = rf"(?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL}))?"
_WHOLE = re.compile(rf"(?P<sign>[-+]?)\s?{_QUOTIENT}\s?[%°]?(?:\s+(?!(?:and|or)\b)[A-Za-z][A-Za-z /.-]*)?")
# A sign after a digit, letter or bracket is a subtraction; digits next to '/', '.' or ',' are part of a date or list.
_INSIDE = re.compile(rf"(?:(?<![\w)\]])(?P<sign>[-+\u2212])[$€£¥]?)?(?<![\w/.,]){_QUOTIENT}(?![\w/]|[.,][0-9])")
_FRAC = re.compile(r"(?<![0-9])\\frac\s?\{\s?(-?[0-9.,]+)\s?\}\s?\{\s?([0-9.,]+)\s?\}(?![0-9])")
_LONGEST = 100  # characters of a number: int() refuses, and takes quadratic time for, runs of thousands of digits


def parse_number(text: str) -> Fraction | None:
    r"""The number that `text` is, or None.

    Understood, besides the notation that `clean` removes: signs, thousands commas, decimals, a/b and \frac{a}{b}, a
    currency sign, a percent or degree sign (dropped: 50% is 50), and words of a unit. Anything else in the text, above
    all a second number, makes it None.
    """
    if len(text) > _LONGEST:
        return None
    match = _WHOLE.fullmatch(_FRAC.sub(r"\1/\2", bare(clean(text))))
    return None if match is None else _value(match)


def last_number_in(text: str) -> Fraction | None:
    """The last number anywhere in a text, or None."""
    matches = [match for match in _INSIDE.finditer(text) if len(match[0]) <= _LONGEST]
    return _value(matches[-1]) if matches else None


def _value(match: re.Match[str]) -> Fraction | None:
    top, bottom = (Fraction((match[part] or "1").replace(",", "").rstrip(".")) for part in ("top", "bottom"))
    if bottom == 0:
        return None
    return top / bottom if match["sign"] in (None, "", "+") else -top / bottom
