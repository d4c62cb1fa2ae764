r"""Expressions in LaTeX or plain notation: their values, and whether two are the same everywhere.

Two expressions are compared by their values where variables are replaced by fixed pseudo-random rationals, positive and
negative (the identity test of Schwartz and Zippel). No expression is rewritten, so the time follows the length of the
text. This is no computer algebra: it solves nothing, and it does not read sums, integrals and limits.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce

from hybrid_grpo.rewards.maths import values
from hybrid_grpo.rewards.maths.values import Unreadable, Value

Evaluate = Callable[[Mapping[str, Fraction]], Value]
"""The value at a point, given by the name of each variable."""

_DEEPEST = 75  # nesting of sums, factors and atoms: 25 brackets
_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log", "lg",
    "exp",
}  # fmt: skip
_GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "lambda", "mu", "nu", "xi",
    "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "Delta", "Gamma", "Omega", "ell",
}  # fmt: skip
_WORDS = _FUNCTIONS | {"sqrt", "pi", "infinity", "frac", "binom", "lfloor", "rfloor", "lceil", "rceil", "overline"}
_CONSTANTS = {"π": "π", "pi": "π", "∞": "∞", "infinity": "∞"}
_OPERATORS = {"*": False, "/": True}
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", "lfloor": "rfloor", "lceil": "rceil"}
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
_SHORT_FRACTION = re.compile(r"\\(frac|binom)\s*(\d)\s*([\d{])")  # \frac12, \frac1{2}
_SHORT_BELOW = re.compile(r"(\\(?:frac|binom)\{[^{}]*\})\s*(\d)")  # \frac{1}2
_TOKEN = re.compile(
    r"\s*(?:(?P<repeating>\d*\.\d*\\overline\s*\{\d+\})|(?P<number>\d+\.?\d*|\.\d+)|\\(?P<command>[A-Za-z]+)"
    r"|(?P<letters>[A-Za-z]+)|(?P<mark>[-+*/^_!°(){}\[\]|'π∞]))"
)


@dataclass(frozen=True)
class Expression:
    """The mathematical expression that a text stands for."""

    value: Evaluate
    names: frozenset[str]
    """Names of its variables."""


def read_expression(text: str) -> Expression:
    r"""The expression that `text` is, after notation.py has cleaned it.

    Understood: + - * / ^ ! and °, products without a sign, \frac{a}{b} and \frac12, mixed numbers, repeating decimals,
    roots, |x|, floor and ceiling, \binom, trigonometric and exponential functions, \log with a base, π, e, i, ∞, and
    variables of one letter with a subscript.

    Raises:
        Unreadable: the text holds anything else.
    """
    reader = _Reader(_tokens(text))
    value = reader.sum()
    reader.expect("")
    return Expression(value, frozenset(reader.names))


def identical(first: Expression, second: Expression) -> bool:
    """Whether both have the same value at four points; without variables one point is enough."""
    pairs = _values(first, second)
    return bool(pairs) and all(values.close(a, b) for a, b in pairs)


def proportional(first: Expression, second: Expression, positive: bool = False) -> bool:
    """Whether one is a constant times the other, and neither is constant; `positive` requires a positive factor."""
    (a, b), *others = _values(first, second) or [(Fraction(0), Fraction(0))]
    if not first.names or not second.names or values.close(a, Fraction(0)) or values.close(b, Fraction(0)):
        return False
    alike = all(values.close(values.times(a, d), values.times(b, c)) for c, d in others)
    return alike and (not positive or values.context().re(values.wide(values.over(a, b))) > 0)


def difference(first: Expression, second: Expression) -> Expression:
    """first - second."""
    return Expression(lambda at: values.plus(first.value(at), -second.value(at)), first.names | second.names)


def product(first: Expression, second: Expression) -> Expression:
    """first * second."""
    return Expression(lambda at: values.times(first.value(at), second.value(at)), first.names | second.names)


def constant(value: Fraction | int | str) -> Expression:
    """A rational number."""
    return Expression(_constant(Fraction(value)), frozenset())


def _values(first: Expression, second: Expression) -> list[tuple[Value, Value]]:
    """The values of both at every point; an empty list where one of them has no value."""
    names = sorted(first.names | second.names)
    points = [{name: _at(name, k) for name in names} for k in range(4 if names else 1)]
    try:
        return [(first.value(point), second.value(point)) for point in points]
    except (ArithmeticError, ValueError, TypeError):
        return []


def _at(name: str, point: int) -> Fraction:
    draw = random.Random(f"{name} {point}")
    size = Fraction(draw.randint(101, 999), draw.choice((101, 211, 307, 401)))
    # Two points where all variables are positive, two with mixed signs: \sqrt{x^2} is not x.
    return size if point < 2 or draw.random() < 0.4 else -size


def _tokens(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each token; every letter of a word that is not known is a variable."""
    tokens, at = [], 0
    text = _SHORT_FRACTION.sub(r"\\\1{\2}\3", text)
    text = _SHORT_BELOW.sub(r"\1{\2}", text)
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Unreadable(text[at:])
        kind, token, at = str(match.lastgroup), match[str(match.lastgroup)], match.end()
        if kind == "letters" and token not in _WORDS:
            if len(token) > 3:
                raise Unreadable(token)
            tokens += [("name", letter) for letter in token]
        elif kind in ("letters", "command"):
            if token not in _WORDS | _GREEK:
                raise Unreadable(token)
            tokens.append(("name" if token in _GREEK else "word", token))
        else:
            tokens.append((kind, token))
    return tokens


class _Reader:
    """Recursive descent over the tokens; every method reads what it is named after, and returns how to evaluate it."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.names: set[str] = set()
        self.closing: list[str] = []

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else "end"

    @property
    def token(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.token
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise Unreadable(f"{token!r} expected")

    def go_down(self) -> None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise Unreadable("too deep")

    def sum(self) -> Evaluate:
        self.go_down()
        terms = []
        while True:
            negative = False
            while self.token in ("+", "-"):
                negative ^= self.take() == "-"
            term = self.product()
            terms.append(_map(operator.neg, term) if negative else term)
            if self.token not in ("+", "-"):
                self.depth -= 1
                return terms[0] if len(terms) == 1 else _map(lambda *parts: reduce(values.plus, parts), *terms)

    def product(self) -> Evaluate:
        factors: list[tuple[bool, Evaluate]] = [(False, self.factor())]
        while True:
            if self.token in _OPERATORS:
                below = _OPERATORS[self.take()]
                negative = self.token == "-" and bool(self.take())
                factor = self.factor()
                factors.append((below, _map(operator.neg, factor) if negative else factor))
            elif self.starts_factor() and self.kind not in ("number", "repeating"):
                mixed = self.mixed()
                if mixed is None:
                    factors.append((False, self.factor()))
                elif len(factors) == 1:
                    factors = [(False, _map(values.plus, factors[0][1], mixed))]
                else:
                    raise Unreadable("a mixed number inside a product")
            else:
                break
        if len(factors) == 1:
            return factors[0][1]
        signs, parts = zip(*factors, strict=True)

        def value(*factors: Value) -> Value:
            result: Value = Fraction(1)
            for below, part in zip(signs, factors, strict=True):
                result = values.over(result, part) if below else values.times(result, part)
            return result

        return _map(value, *parts)

    def starts_factor(self) -> bool:
        if self.kind == "end" or (self.closing and self.token == self.closing[-1]):
            return False
        return self.kind in ("number", "repeating", "name") or self.token in _WORDS | {"(", "[", "{", "|", "π", "∞"}

    def mixed(self) -> Evaluate | None:
        r"""The fraction of a mixed number such as 1\frac{3}{4}: a whole number, then digits above larger ones."""
        kind, before = self.tokens[self.at - 1]
        powers = self.at > 1 and self.tokens[self.at - 2][1] in ("^", "_")
        if self.token != "frac" or kind != "number" or not before.isdigit() or powers:
            return None
        texts = [text for _, text in self.tokens[self.at + 1 : self.at + 7]]
        if texts[:1] != ["{"] or texts[2:4] != ["}", "{"] or texts[5:] != ["}"]:
            return None
        top, bottom = texts[1], texts[4]
        if not (top.isdigit() and bottom.isdigit() and int(top) < int(bottom)):
            return None
        self.at += 7
        return _constant(Fraction(int(top), int(bottom)))

    def factor(self) -> Evaluate:
        self.go_down()
        base = self.atom()
        while self.token in ("!", "^", "°"):
            sign = self.take()
            if sign == "^":
                base = _map(values.power, base, self.exponent())
            else:
                base = _map(values.factorial if sign == "!" else values.radians, base)
        self.depth -= 1
        return base

    def exponent(self) -> Evaluate:
        if self.token == "-":
            self.take()
            return _map(operator.neg, self.factor())
        return self.factor()

    def group(self) -> Evaluate:
        opening = self.take()
        self.closing.append(_CLOSING[opening])
        value = self.sum()
        self.expect(self.closing.pop())
        if opening == "|":
            return _map(abs, value)
        if opening == "lfloor":
            return _map(values.floor, value)
        return _map(lambda v: -values.floor(-v), value) if opening == "lceil" else value

    def atom(self) -> Evaluate:
        self.go_down()
        value = self.deeper_atom()
        self.depth -= 1
        return value

    def deeper_atom(self) -> Evaluate:
        if self.kind == "number":
            return _constant(Fraction(self.take().rstrip(".")))
        if self.kind == "repeating":
            return _constant(_repeating(self.take()))
        if self.token in ("(", "[", "{", "|", "lfloor", "lceil"):
            return self.group()
        if self.token in _CONSTANTS:
            return partial(_named, _CONSTANTS[self.take()])
        if self.kind == "name":
            return self.name()
        word = self.take()
        if word in ("frac", "binom"):
            top, bottom = self.atom(), self.atom()
            return _map(values.over if word == "frac" else values.binomial, top, bottom)
        if word == "sqrt":
            degree = _constant(Fraction(2))
            if self.token == "[":
                degree = self.group()
            return _map(lambda x, n: values.power(x, values.over(Fraction(1), n)), self.atom(), degree)
        if word in _FUNCTIONS:
            return self.function(word)
        raise Unreadable(word)

    def name(self) -> Evaluate:
        name = self.take()
        if self.token == "_":
            self.take()
            if self.token == "{":
                self.take()
                subscript = ""
                while self.kind in ("number", "name"):
                    subscript += self.take()
                self.expect("}")
            else:
                subscript = self.take()
            name += "_" + subscript
        while self.token == "'":
            name += self.take()
        if name in ("e", "i"):
            return partial(_named, name)
        self.names.add(name)
        return lambda at: at[name]

    def function(self, word: str) -> Evaluate:
        base = power = None
        while self.token in ("_", "^"):
            if [token for _, token in self.tokens[self.at : self.at + 5]] == ["^", "{", "-", "1", "}"]:
                word, self.at = f"arc{word}", self.at + 5
            elif self.take() == "_":
                base = self.atom()
            else:
                power = self.exponent()
        if self.token in ("(", "[", "{", "|"):
            value = self.factor()
        else:
            # \sin 2x is the sine of the product 2x; a sign, a bracket or another function ends the product.
            parts = [self.factor()]
            while self.kind == "name" or self.token in ("π", "pi", "frac", "sqrt"):
                parts.append(self.factor())
            value = _map(lambda *parts: reduce(values.times, parts), *parts)
        applied = _map(lambda x: values.applied(word, x), value)
        if base is not None:
            applied = _map(
                lambda x, b: values.over(x, values.applied("ln", b)),
                _map(lambda x: values.applied("ln", x), value),
                base,
            )
        return applied if power is None else _map(values.power, applied, power)


def _map(function: Callable[..., Value], *parts: Evaluate) -> Evaluate:
    return lambda at: function(*(part(at) for part in parts))


def _constant(value: Value) -> Evaluate:
    return lambda at: value


def _named(name: str, at: Mapping[str, Fraction]) -> Value:
    return values.named(name)


def _repeating(text: str) -> Fraction:
    whole, decimals, period = _REPEATING.fullmatch(text).groups()  # type: ignore[union-attr]
    tail = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(decimals)
    return Fraction(f"{whole or 0}.{decimals or 0}") + tail
