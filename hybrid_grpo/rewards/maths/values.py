r"""Arithmetic that cannot run away: exact on rationals, with 60 digits on everything else.

Operations whose result would grow without bound (9^{9^{9^9}}, 100000!) are refused before they are computed.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

Value = Any
"""A Fraction, or a number of mpmath."""

DIGITS, AGREEING = 60, 40
_MOST_BITS = 20_000  # of an exact power; a larger one is computed with 60 digits
_LARGEST_LOG = 1e15  # natural logarithm of the largest number
_LARGEST_ANGLE = 1e30  # largest argument of a function, and largest number that is rounded down
_LARGEST_FACTORIAL = 3000
_MPMATH_NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log"}


class Unreadable(ValueError):
    """The text is no expression in the notation that is understood, or its value is out of all bounds."""


@cache
def context() -> Any:
    """An mpmath context of our own, so that the number of digits changes nothing elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mpmath

    made = mpmath.MPContext()
    made.dps = DIGITS
    return made


def wide(value: Value) -> Value:
    """The value as a number of mpmath."""
    return context().mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def exact(*values: Value) -> bool:
    """Whether all of the values are rational numbers."""
    return all(isinstance(value, Fraction) for value in values)


def close(a: Value, b: Value) -> bool:
    """Whether the values are equal: exactly for rational numbers, to 40 digits for others."""
    if exact(a, b):
        return bool(a == b)
    a, b = wide(a), wide(b)
    if a == b or context().isinf(a) or context().isinf(b):
        return bool(a == b)
    # The floor of 1e-5 lets \sin\pi be 0.
    return bool(abs(a - b) <= context().mpf(10) ** -AGREEING * max(abs(a), abs(b), context().mpf(10) ** -5))


def _of_two(operation: Callable[[Any, Any], Any]) -> Callable[[Value, Value], Value]:
    return lambda a, b: operation(a, b) if exact(a, b) else operation(wide(a), wide(b))


plus, times, over = map(_of_two, (operator.add, operator.mul, operator.truediv))


def power(base: Value, exponent: Value) -> Value:
    """base ** exponent; an odd root of a negative number is real."""
    if exact(base, exponent):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1 and bits * abs(exponent) <= _MOST_BITS:
            return base ** int(exponent)
        if base < 0 and exponent.denominator % 2 and exponent.denominator > 1:
            # The real root, as taught at school: \sqrt[3]{-8} is -2.
            return power(-base, exponent) * (-1) ** (exponent.numerator % 2)
    base, exponent = wide(base), wide(exponent)
    if base == 0:
        return base**exponent
    if not abs(context().log(base)) * abs(exponent) < _LARGEST_LOG:
        raise Unreadable("a power beyond all bounds")
    return base**exponent


def factorial(value: Value) -> Value:
    """n! of a whole number up to 3,000."""
    if not exact(value) or value.denominator != 1 or not 0 <= value <= _LARGEST_FACTORIAL:
        raise Unreadable("a factorial of no small number")
    return Fraction(math.factorial(int(value)))


def binomial(n: Value, k: Value) -> Value:
    """n over k."""
    return over(factorial(n), times(factorial(k), factorial(plus(n, -k))))


def radians(degrees: Value) -> Value:
    """An angle in degrees, in radians."""
    return wide(degrees) * context().pi / 180


def floor(value: Value) -> Value:
    """The largest whole number that is not above the value."""
    if exact(value):
        return Fraction(math.floor(value))
    if not abs(value) < _LARGEST_ANGLE:
        raise Unreadable("the floor of a number beyond all bounds")
    return context().floor(value)


def applied(function: str, value: Value) -> Value:
    """The value of a function that is named as in LaTeX."""
    value = wide(value)
    if function in ("log", "lg"):
        return context().log(value) / context().log(10)
    if not abs(value) < _LARGEST_ANGLE and function != "ln":
        raise Unreadable("a function of a number beyond all bounds")
    if function == "exp":
        return power(named("e"), value)
    return getattr(context(), _MPMATH_NAMES.get(function, function))(value)


def named(name: str) -> Value:
    """π, ∞, e or i."""
    if name == "i":
        return context().mpc(0, 1)
    return +{"π": context().pi, "∞": context().inf, "e": context().e}[name]
