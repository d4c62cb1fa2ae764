r"""Parses expressions in LaTeX or plain notation, evaluates them, and decides whether two are equal everywhere.

Two expressions are compared by their values at fixed points: their variables are replaced by pseudo-random rationals,
positive and negative (Schwartz-Zippel identity testing). Nothing is rewritten, so the time is proportional to the
length of the text. This is not computer algebra: it solves nothing and reads no sums, integrals or limits.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial

from hybrid_grpo.rewards.maths import values
from hybrid_grpo.rewards.maths.notation import TABLE
from hybrid_grpo.rewards.maths.values import Unreadable, Value

_DEEPEST = 50  # nested operators, functions and brackets
_FUNCTIONS, _GREEK = set(TABLE["functions"]), set(TABLE["greek"])
_WORDS = _FUNCTIONS | {"sqrt", "frac", "binom", "lfloor", "rfloor", "lceil", "rceil"}
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", "lfloor": "rfloor", "lceil": "rceil"}
_AROUND: dict[str, Callable[[Value], Value]] = {
    "|": abs,
    "lfloor": values.floor,
    "lceil": lambda value: -values.floor(-value),
}
_SUM, _PRODUCT, _POWER, _ATOM = 1, 2, 3, 4
_OPERATORS: dict[str, tuple[int, Callable[[Value, Value], Value]]] = {
    "+": (_SUM, operator.add),
    "-": (_SUM, operator.sub),
    "*": (_PRODUCT, operator.mul),
    "/": (_PRODUCT, operator.truediv),
    "^": (_POWER, values.power),
}
_POSTFIX: dict[str, Callable[[Value], Value]] = {
    "!": values.factorial,
    "°": lambda value: value * values.named("π") / 180,
    "%": lambda value: value / 100,
}
_MIXED = re.compile(r"(?<![\d.^_])(?<!\d )(\d+)\s*(\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\})")
_REPEATING = re.compile(r"(?<!\d)(?<!\d )(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+\.?\d*|\.\d+)|(?P<word>\\?[A-Za-z]+)"
    r"|(?P<suffix>_\s*(?:\\[A-Za-z]+|\d+|[A-Za-z]|\{(?:[^{}]|\{[^{}]*\})*\})|')|(?P<mark>[-+*/^!°%(){}\[\]|π∞]))"
)


@dataclass(frozen=True)
class Expression:
    values: tuple[Value, ...]
    """The value at each point; only one value if there are no variables, and empty if any value is undefined."""
    names: frozenset[str] = frozenset()
    """The variables of the expression."""

    def __sub__(self, other: Expression) -> Expression:
        return applied(operator.sub, self, other)

    def __mul__(self, other: Expression) -> Expression:
        return applied(operator.mul, self, other)


def applied(function: Callable[..., Value], *parts: Expression) -> Expression:
    """Return the expression that results from applying a function to the values of `parts` at every point."""
    names = frozenset[str]().union(*(part.names for part in parts))
    try:
        found = tuple(values.bounded(function(*values.alike(*at))) for at in _at_points(*parts))
    except (ArithmeticError, ValueError, TypeError):
        found = ()
    return Expression(found, names)


def constant(value: Fraction | int | str) -> Expression:
    """A rational number as an expression."""
    return Expression((Fraction(value),))


def identical(first: Expression, second: Expression) -> bool:
    """Whether both are defined and equal at all points."""
    pairs = _at_points(first, second)
    return bool(pairs) and all(values.close(a, b) for a, b in pairs)


def proportional(first: Expression, second: Expression, positive: bool = False) -> bool:
    """Whether neither is constant and one is a constant multiple of the other (if `positive`, a positive multiple)."""
    (a, b), *others = _at_points(first, second) or [(Fraction(0), Fraction(0))]
    if not first.names or not second.names or values.close(a, Fraction(0)) or values.close(b, Fraction(0)):
        return False
    alike = all(values.close(a * d, b * c) for c, d in others)
    return alike and (not positive or values.context.re(values.wide(a) / values.wide(b)) > 0)


def read_expression(text: str) -> Expression:
    r"""Parse a text that `notation.clean` has cleaned; raises Unreadable if it contains anything but the following.

    + - * / ^ ! % and °, products without a sign, \frac{a}{b} and \frac12, mixed numbers, repeating decimals, roots,
    |x|, floor and ceiling, \binom, trigonometric and exponential functions, \log with a base, π, e, i, ∞, and
    variables of one letter with a subscript.
    """
    parser = _Parser(_tokens(text))
    value = parser.expression()
    parser.expect("")
    return value


def _at_points(*parts: Expression) -> list[tuple[Value, ...]]:
    """Return the values of all parts, point by point; empty if any part is undefined."""
    if not all(part.values for part in parts):
        return []
    points = max(len(part.values) for part in parts)
    return [tuple(part.values[point % len(part.values)] for part in parts) for point in range(points)]


@lru_cache(maxsize=1000)
def _variable(name: str) -> Expression:
    drawn = []
    for point in range(4):
        draw = random.Random(f"{name} {point}")
        size = Fraction(draw.randint(101, 999), draw.choice((101, 211, 307, 401)))
        # Two points where all variables are positive, two with mixed signs: \sqrt{x^2} is not x.
        drawn.append(size if point < 2 or draw.random() < 0.4 else -size)
    return Expression(tuple(drawn), frozenset((name,)))


def _tokens(text: str) -> list[tuple[str, str]]:
    """Return (kind, text) for each token; every letter of an unknown short word is a variable."""
    tokens, at = [], 0
    text = _MIXED.sub(lambda m: f"({m[1]}+{m[2]})" if int(m[3]) < int(m[4]) else m[0], text).rstrip()
    # 0.1\overline{6} is 0.1 + 6/90.
    text = _REPEATING.sub(lambda m: f"({m[1]}.{m[2]}0+{m[3]}/{'9' * len(m[3])}{'0' * len(m[2])})", text)
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable(text[at:])
        kind, token, at = str(match.lastgroup), match[str(match.lastgroup)], match.end()
        name = token.removeprefix("\\")
        if kind != "word" or name in _WORDS:
            tokens.append((kind, name))
        elif name in _GREEK and name != token:
            tokens.append(("name", name))
        elif name == token and len(name) <= 3:
            tokens += [("name", letter) for letter in name]
        else:
            raise Unreadable(token)
    return tokens


class _Parser:
    """A Pratt parser; each method parses what it is named after."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at = [*tokens, ("end", "")], 0
        self.closing, self.depth = [""], 0

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def token(self) -> str:
        return self.tokens[self.at][1]

    def take(self) -> str:
        token = self.token
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise Unreadable(f"{token!r} expected")

    def expression(self, above: int = 0) -> Expression:
        """Parse an expression whose operators bind more tightly than the level `above`."""
        self.depth += 1
        if self.depth > _DEEPEST:
            raise Unreadable("too deep")
        if self.token in ("+", "-") and above < _ATOM:
            sign = operator.neg if self.take() == "-" else operator.pos
            left = applied(sign, self.expression(max(above, _SUM)))
        else:
            left = self.atom()
        while True:
            strength, operation = _OPERATORS.get(self.token, (0, operator.mul))
            if self.token in _POSTFIX and above < _ATOM:
                left = applied(_POSTFIX[self.take()], left)
            elif strength > above:
                self.take()
                # Powers group from the right: 2^3^2 is 2^9.
                left = applied(operation, left, self.expression(strength - (strength == _POWER)))
            elif above < _PRODUCT and not strength and self.starts_factor():
                left = applied(operator.mul, left, self.expression(_PRODUCT))
            else:
                self.depth -= 1
                return left

    def starts_factor(self) -> bool:
        """Whether the next token can begin a factor with no sign before it: 2x is a product, 2 3 is not."""
        starts = self.kind == "name" or self.token in _WORDS | {"(", "[", "{", "|", "π", "∞"}
        return starts and self.token != self.closing[-1]

    def group(self) -> Expression:
        opening = self.take()
        self.closing.append(_CLOSING[opening])
        value = self.expression()
        self.expect(self.closing.pop())
        return applied(_AROUND[opening], value) if opening in _AROUND else value

    def atom(self) -> Expression:
        if self.kind == "number":
            return constant(self.take().rstrip("."))
        if self.kind == "name" or self.token in ("π", "∞"):
            return self.name()
        if self.token in _CLOSING:
            return self.group()
        word = self.take()
        if word in ("frac", "binom"):
            operation = operator.truediv if word == "frac" else values.binomial
            return applied(operation, self.expression(_ATOM), self.expression(_ATOM))
        if word == "sqrt":
            degree = self.group() if self.token == "[" else constant(2)
            return applied(lambda x, n: values.power(x, 1 / n), self.expression(_ATOM), degree)
        if word in _FUNCTIONS:
            return self.function(word)
        raise Unreadable(word)

    def name(self) -> Expression:
        name = self.take()
        while self.kind == "suffix":
            name += re.sub(r"[\s{}]", "", self.take())
        return Expression((values.named(name),)) if name in ("e", "i", "π", "∞") else _variable(name)

    def function(self, word: str) -> Expression:
        base = power = None
        while self.kind == "suffix" or self.token == "^":
            if self.kind == "suffix":
                base = read_expression(self.take()[1:])
            else:
                self.take()
                power = self.expression(_PRODUCT)
        bracketed = self.token in ("(", "[", "{", "|")
        value = self.expression(_PRODUCT)
        # \sin 2x is the sine of the product 2x; a sign, a bracket or another function ends the product.
        while not bracketed and (self.kind == "name" or self.token in ("π", "frac", "sqrt")):
            value = value * self.expression(_PRODUCT)
        result = applied(partial(values.applied, word if base is None else "ln"), value)
        if base is not None:
            result = applied(operator.truediv, result, applied(partial(values.applied, "ln"), base))
        return result if power is None else applied(values.power, result, power)
