r"""Whether two texts are the same answer, by the conventions that the docstring of `math_answer` states."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from hybrid_grpo.rewards.maths.expressions import Expression, constant, difference, identical, product, proportional
from hybrid_grpo.rewards.maths.notation import LONGEST, bare, clean, words
from hybrid_grpo.rewards.maths.numeric import parse_number
from hybrid_grpo.rewards.maths.reading import (
    MOST_PARTS,
    Answer,
    Chain,
    Number,
    Ordered,
    Ratio,
    Relation,
    Unordered,
    Words,
    expression_of,
    holds_words,
    read_answer,
)
from hybrid_grpo.rewards.maths.values import Unreadable

_PLAIN_NUMBER = re.compile(r"[-+\u2212\d.,/$*` ]+")
_CHOICE = re.compile(r"(?:[Oo]ption|[Cc]hoice)?\s*\(?([A-J])(?:$|[).:])")
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])")
_UNDONE = re.compile(r"\\(?:sum|prod|i*nt|oint|lim|partial|det)(?![A-Za-z])")
_SETS = re.compile(r"\\(?:setminus|backslash|cap)(?![A-Za-z])")


def same_answer(stated: str, gold: str) -> bool:
    """Whether the two are the same answer."""
    if _PLAIN_NUMBER.fullmatch(stated) and _PLAIN_NUMBER.fullmatch(gold):
        numbers = parse_number(stated), parse_number(gold)
        if None not in numbers:
            return numbers[0] == numbers[1]
    if not stated.strip():
        return False
    stated, gold = clean(stated), clean(gold)
    if stated and words(stated) == words(gold):
        return True
    if max(len(stated), len(gold)) > LONGEST:
        return False
    choice, picked = _CHOICE.match(bare(gold)), _CHOICE.match(bare(stated))
    if choice and picked:
        return set(_LETTER.findall(bare(stated))) == {choice[1]} == {picked[1]}
    if _UNDONE.search(gold) or _SETS.search(stated + gold):
        return _by_math_verify(stated, gold)
    return _same(read_answer(stated), read_answer(gold))


def is_mathematical(text: str) -> bool:
    """Whether the text is read as anything but words; letters alone are words."""
    text = clean(text)
    if len(text) > LONGEST or re.fullmatch("[A-Za-z ]*", text):
        return False
    return not holds_words(read_answer(text))


def _same(first: Answer, second: Answer) -> bool:
    a, b = _settled(first), _settled(second)
    match a, b:
        case Number(), Number():
            return _same_number(a, b)
        case (Ordered(relation=Relation() as one), Ordered(relation=Relation() as other)) | (
            Unordered(relation=Relation() as one),
            Unordered(relation=Relation() as other),
        ):
            return _same_relation(one, other)
        case Ordered(), Ordered():
            alike = a.brackets == b.brackets and len(a.parts) == len(b.parts)
            return alike and all(map(_same, a.parts, b.parts))
        case Unordered(), Unordered():
            parts = [_distinct(each.parts) if "set" in (a.kind, b.kind) else list(each.parts) for each in (a, b)]
            return (a.kind == "union") == (b.kind == "union") and _same_parts(*parts)
        case (Ratio() as ratio, Ordered(ratio=Ratio() as time)) | (Ordered(ratio=Ratio() as time), Ratio() as ratio):
            return _in_ratio(ratio.parts, time.parts)
        case Ratio(), Ratio():
            return _in_ratio(a.parts, b.parts)
        case (Ratio(parts=(_, _) as parts), Number(sign="") as number) | (
            Number(sign="") as number,
            Ratio(parts=(_, _) as parts),
        ):
            return not number.unit.known and _in_ratio(parts, (number.expression, constant(1)))
        case Words(), Words():
            return words(a.text) == words(b.text)
    relations = _as_relation(a), _as_relation(b)
    if relations[0] is None or relations[1] is None or (not isinstance(a, Relation) and not isinstance(b, Relation)):
        return False
    return _same_relation(relations[0], relations[1])


def _settled(answer: Answer) -> Answer | None:
    """The one answer that a chain of equals or a set of one element is; None for a chain that is not true."""
    if isinstance(answer, Unordered) and answer.kind == "set" and len(parts := _distinct(answer.parts)) == 1:
        return parts[0]
    if not isinstance(answer, Chain):
        return answer
    *parts, last = answer.parts
    if any(map(holds_words, parts)) or not all(_same(part, last) for part in parts):
        return answer.relation
    return last.called(answer.name) if isinstance(last, Number) else last


def _same_number(a: Number, b: Number) -> bool:
    if a.base != b.base and a.base and b.base:
        return False
    if a.base or b.base:
        a, b = (each if each.base else _in_digits(each) for each in (a, b))
    if a.name and b.name and a.name != b.name:
        first, second = _as_relation(a), _as_relation(b)
        if a.expression.names and b.expression.names and first and second and _same_relation(first, second):
            return True  # y = 2x is x = y/2
        if len(a.name) == len(b.name) == 1:
            return False
    if (a.whole and identical(a.whole, b.whole or b.expression)) or (b.whole and identical(a.expression, b.whole)):
        return True
    if a.unit.known and b.unit.known:
        alike = a.unit.dimensions == b.unit.dimensions
        factors = constant(a.unit.factor), constant(b.unit.factor)
        return alike and identical(product(a.expression, factors[0]), product(b.expression, factors[1]))
    if a.sign != b.sign and identical(_in_ones(a), _in_ones(b)):
        return True
    return {a.sign, b.sign} != {"%", "°"} and identical(a.expression, b.expression)


def _in_digits(number: Number) -> Number:
    """A whole number with its digits read in base 16, as reading.py reads numbers with a base."""

    def value(at: Mapping[str, Fraction]) -> Fraction:
        decimal = number.expression.value(at)
        if not isinstance(decimal, Fraction) or decimal.denominator != 1 or not 0 <= decimal < 10**100:
            raise Unreadable("no whole number")
        return Fraction(int(str(decimal), 16))

    return replace(number, expression=Expression(value, number.expression.names))


def _in_ones(number: Number) -> Expression:
    """The value of a number whose percent sign is a factor: 50% is 1/2."""
    return product(number.expression, constant("1/100")) if number.sign == "%" else number.expression


def _distinct(parts: Sequence[Answer]) -> list[Answer]:
    """The parts of a set, each once."""
    distinct: list[Answer] = []
    for part in parts[:MOST_PARTS]:
        if not any(_same(part, other) for other in distinct):
            distinct.append(part)
    return distinct


def _same_parts(a: list[Answer], b: list[Answer]) -> bool:
    """Whether the parts are the same in any order."""
    if len(a) != len(b) or len(a) > MOST_PARTS:
        return False
    for part in a:
        at = next((k for k, other in enumerate(b) if _same(part, other)), None)
        if at is None:
            return False
        del b[at]
    return True


def _in_ratio(a: Sequence[Expression], b: Sequence[Expression]) -> bool:
    """Whether a and b have the same proportions; zeros have none."""
    if len(a) != len(b) or any(identical(part, constant(0)) for part in (*a, *b)):
        return False
    return all(identical(product(x, b[0]), product(a[0], y)) for x, y in zip(a[1:], b[1:], strict=True))


def _as_relation(answer: Answer | None) -> Relation | None:
    """The relation that an answer is or can be read as: y = 2x gives the value of y, and relates x and y."""
    if isinstance(answer, Relation | Ordered):
        return answer if isinstance(answer, Relation) else answer.relation
    if isinstance(answer, Number) and (name := expression_of(answer.name)) is not None:
        return Relation("=", name, answer.expression)
    return None


def _same_relation(a: Relation, b: Relation) -> bool:
    inequality = a.sign in ("<", "<=")
    return a.sign == b.sign and proportional(difference(a.left, a.right), difference(b.left, b.right), inequality)


def _by_math_verify(stated: str, gold: str) -> bool:
    """Compare sums, integrals, limits and set differences. Slow at times: the caller's time limit bounds it."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    read = [
        parse(rf"\boxed{{{_latex(text)}}}", config, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (gold, stated)
    ]
    return all(read) and bool(verify(read[0], read[1], float_rounding=15, strict=True, timeout_seconds=None))


def _latex(text: str) -> str:
    for plain, command in {
        "π": r"\pi ",
        "∞": r"\infty ",
        "⊔": r"\cup ",
        "*": r"\cdot ",
        "⦃": r"\{",
        "⦄": r"\}",
    }.items():
        text = text.replace(plain, command)
    return text
