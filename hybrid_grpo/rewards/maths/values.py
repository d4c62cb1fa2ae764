r"""Bounded arithmetic: exact for rational numbers, with 60 digits for all others.

Operations with huge results (9^{9^{9^9}}, 100000!) are refused before they are computed.
"""

import math
from fractions import Fraction
from typing import Any

import mpmath

Value = Any
"""A Fraction, or a number of mpmath."""

_DIGITS, _AGREEING = 60, 40
_MOST_BITS = 5000  # of an exact number; a larger one is computed with 60 digits
_LARGEST_LOG = 1e15  # natural logarithm of the largest number
_LARGEST_ANGLE = 1e30  # largest argument of a function or of floor
_LARGEST_FACTORIAL = 3000
_LOGARITHMS = {"ln": "log", "log": "log10", "lg": "log10"}
_MPMATH_NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", **_LOGARITHMS}
context = mpmath.MPContext()
"""A separate context of mpmath, so that its precision affects no other code."""
context.dps = _DIGITS


class Unreadable(ValueError):
    """The text is not an expression that can be parsed, or its value is out of bounds."""


def wide(value: Value) -> Value:
    """The value as an mpmath number."""
    return context.convert(value)


def alike(*values: Value) -> tuple[Value, ...]:
    """Return the values, all as mpmath numbers if any of them is one: mpmath does not always accept Fractions."""
    return values if _exact(*values) else tuple(map(wide, values))


def bounded(value: Value) -> Value:
    """Return the value, rounded to 60 digits if its exact form is much longer."""
    return wide(value) if isinstance(value, Fraction) and _bits(value) > _MOST_BITS else value


def close(a: Value, b: Value) -> bool:
    """Whether the values are equal: exactly if both are rational, otherwise to 40 digits."""
    a, b = alike(a, b)
    if a == b or _exact(a, b) or context.isinf(a) or context.isinf(b):
        return bool(a == b)
    ten = context.mpf(10)
    # The floor of 1e-5 lets \sin\pi be 0.
    return bool(abs(a - b) <= ten**-_AGREEING * max(abs(a), abs(b), ten**-5))


def power(base: Value, exponent: Value) -> Value:
    """base ** exponent; an odd root of a negative number is real."""
    if _exact(base, exponent):
        if exponent.denominator == 1 and _bits(base) * abs(exponent) <= _MOST_BITS:
            return base ** int(exponent)
        if base < 0 and exponent.denominator % 2 and exponent.denominator > 1:
            # The real root, as taught at school: \sqrt[3]{-8} is -2.
            return power(-base, exponent) * (-1) ** (exponent.numerator % 2)
    base, exponent = wide(base), wide(exponent)
    if base == 0 and context.re(exponent) > 0:
        return Fraction(0)
    if not abs(context.log(base)) * abs(exponent) < _LARGEST_LOG:
        raise Unreadable("a power beyond all bounds")
    return base**exponent


def factorial(value: Value) -> Value:
    """n! of a whole number up to 3,000."""
    if not _exact(value) or value.denominator != 1 or not 0 <= value <= _LARGEST_FACTORIAL:
        raise Unreadable("a factorial of something other than a small whole number")
    return Fraction(math.factorial(int(value)))


def binomial(n: Value, k: Value) -> Value:
    """The binomial coefficient, n choose k."""
    return factorial(n) / (factorial(k) * factorial(n - k))


def floor(value: Value) -> Value:
    if _exact(value):
        return Fraction(math.floor(value))
    if not abs(value) < _LARGEST_ANGLE:
        raise Unreadable("the floor of a number beyond all bounds")
    return context.floor(value)


def applied(function: str, value: Value) -> Value:
    """Apply a function, given by its name in LaTeX, to a value."""
    if function == "exp":
        return power(named("e"), value)
    if not abs(wide(value)) < _LARGEST_ANGLE and function not in _LOGARITHMS:
        raise Unreadable("a function of a number beyond all bounds")
    return getattr(context, _MPMATH_NAMES.get(function, function))(value)


def named(name: str) -> Value:
    """Return the constant with this name: π, ∞, e or i."""
    constants = {"π": context.pi, "∞": context.inf, "e": context.e, "i": context.mpc(0, 1)}
    return +constants[name]


def _exact(*values: Value) -> bool:
    return all(isinstance(value, Fraction) for value in values)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
