r"""Arithmetic that cannot run away: exact on rationals, with 60 digits on everything else.

What would grow without bound (9^{9^{9^9}}, 100000!) is refused before it is computed.
"""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from functools import cache
from typing import Any

Value = Any
"""A Fraction, or a number of mpmath."""

DIGITS, AGREEING = 60, 40
_MOST_BITS = 20_000  # of an exact power; beyond it has 60 digits
_LARGEST_LOG = 1e15  # natural logarithm of the largest number
_LARGEST_ANGLE = 1e30  # and of what is rounded down
_LARGEST_FACTORIAL = 3000
_MPMATH_NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log"}


class Unreadable(ValueError):
    """The text is no expression in the notation that is understood, or its value is out of all bounds."""


@cache
def context() -> Any:
    """Of mpmath, with the number of digits that is used here and nowhere else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mpmath

    made = mpmath.MPContext()
    made.dps = DIGITS
    return made


def wide(value: Value) -> Value:
    """As a number of mpmath."""
    return context().mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def exact(*values: Value) -> bool:
    return all(isinstance(value, Fraction) for value in values)


def close(a: Value, b: Value) -> bool:
    """Equal, or as good as equal where one is no Fraction."""
    if exact(a, b):
        return bool(a == b)
    a, b = wide(a), wide(b)
    if a == b or context().isinf(a) or context().isinf(b):
        return bool(a == b)
    # The floor lets \sin\pi be 0.
    return bool(abs(a - b) <= context().mpf(10) ** -AGREEING * max(abs(a), abs(b), context().mpf(10) ** -5))


def plus(a: Value, b: Value) -> Value:
    return a + b if exact(a, b) else wide(a) + wide(b)


def minus(a: Value) -> Value:
    return -a


def times(a: Value, b: Value) -> Value:
    return a * b if exact(a, b) else wide(a) * wide(b)


def over(a: Value, b: Value) -> Value:
    return a / b if exact(a, b) else wide(a) / wide(b)


def power(base: Value, exponent: Value) -> Value:
    if exact(base, exponent):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator == 1 and bits * abs(exponent) <= _MOST_BITS:
            return base ** int(exponent)
        if base < 0 and exponent.denominator % 2 and exponent.denominator > 1:
            # The real root, as school has it: \sqrt[3]{-8} is -2.
            return power(-base, exponent) * (-1) ** (exponent.numerator % 2)
    base, exponent = wide(base), wide(exponent)
    if base == 0:
        return base**exponent
    if not abs(context().log(base)) * abs(exponent) < _LARGEST_LOG:
        raise Unreadable("a power beyond all bounds")
    return base**exponent


def factorial(value: Value) -> Value:
    if not exact(value) or value.denominator != 1 or not 0 <= value <= _LARGEST_FACTORIAL:
        raise Unreadable("a factorial of no small number")
    return Fraction(math.factorial(int(value)))


def binomial(n: Value, k: Value) -> Value:
    return over(factorial(n), times(factorial(k), factorial(plus(n, -k))))


def radians(degrees: Value) -> Value:
    return wide(degrees) * context().pi / 180


def modulus(value: Value) -> Value:
    return abs(value)


def floor(value: Value) -> Value:
    if exact(value):
        return Fraction(math.floor(value))
    if not abs(value) < _LARGEST_ANGLE:
        raise Unreadable("the floor of a number beyond all bounds")
    return context().floor(value)


def applied(function: str, value: Value) -> Value:
    """A function by its name in LaTeX."""
    value = wide(value)
    if function in ("log", "lg"):
        return context().log(value) / context().log(10)
    if not abs(value) < _LARGEST_ANGLE and function != "ln":
        raise Unreadable("a function of a number beyond all bounds")
    if function == "exp":
        return power(e(), value)
    return getattr(context(), _MPMATH_NAMES.get(function, function))(value)


def pi() -> Value:
    return +context().pi


def infinity() -> Value:
    return context().inf


def e() -> Value:
    return +context().e


def i() -> Value:
    return context().mpc(0, 1)
