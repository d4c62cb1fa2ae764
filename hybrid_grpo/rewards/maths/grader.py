"""Decides whether two texts are the same answer, by the conventions of docs/rewards/maths.md."""

import logging
import os
import re
import signal
from collections.abc import Sequence
from functools import lru_cache

from hybrid_grpo.rewards.maths.expressions import Expression, constant, identical, proportional
from hybrid_grpo.rewards.maths.notation import LONGEST, TABLE, bare, clean, words
from hybrid_grpo.rewards.maths.parser import (
    MOST_PARTS,
    UNEVALUATED,
    Answer,
    Chain,
    Either,
    Operation,
    Ordered,
    Quantity,
    Ratio,
    Relation,
    Unevaluated,
    Unordered,
    Words,
    contains,
    read_answer,
)
from hybrid_grpo.rewards.maths.sets import real_set, same_set

_CHOICE = re.compile(r"(?:[Oo]ption|[Cc]hoice)?\s*\(?([A-J])(?:$|[).:])")
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])")
_MATH_VERIFY_S = 5.0
"""CPU seconds for comparing two expressions, after which they count as different."""


def same_answer(stated: str, gold: str) -> bool:
    """Whether a stated answer is the same as the reference answer `gold`."""
    if not stated.strip() or len(stated) > 4 * LONGEST:
        return False
    stated, gold = clean(stated), clean(gold)
    if stated and words(stated) == words(gold):
        return True
    if max(len(stated), len(gold)) > LONGEST:
        return False
    choice, picked = _CHOICE.match(bare(gold)), _CHOICE.match(bare(stated))
    if choice and picked:
        return set(_LETTER.findall(bare(stated))) == {choice[1]} == {picked[1]}
    # Only the reference is evaluated: a model's own answer could take any time to evaluate.
    if not UNEVALUATED.search(gold):
        stated = UNEVALUATED.sub(r"\\unevaluated", stated)
    return _same(read_answer(stated), read_answer(gold))


def is_mathematical(text: str) -> bool:
    """Whether a text is a mathematical answer rather than words; letters alone count as words."""
    text = clean(text)
    if len(text) > LONGEST or re.fullmatch("[A-Za-z ]*", text):
        return False
    return not contains(read_answer(text), Words)


_ORDER = (Either, Chain, Unordered, Ordered, Ratio, Quantity, Relation, Operation, Unevaluated, Words)


def _same(first: Answer, second: Answer) -> bool:
    a, b = sorted((first, second), key=lambda answer: _ORDER.index(type(answer)))
    if contains(a, Operation) or contains(b, Operation):
        sets = real_set(a), real_set(b)
        if sets[0] is not None and sets[1] is not None:
            return same_set(sets[0], sets[1])
    match a, b:
        case Either(), Either():
            return _same(a.parts[0], b.parts[0])
        case Either(), _:
            return any(_same(part, b) for part in a.parts)
        case Chain(), _:
            return all(_same(part, b) for part in a.parts)
        case Unordered(), Unordered():
            parts = [_distinct(each.parts) if "set" in (a.kind, b.kind) else list(each.parts) for each in (a, b)]
            return (a.kind == "union") == (b.kind == "union") and _same_parts(*parts)
        case Unordered(kind="set"), _:  # {5} is 5
            return bool(a.parts) and all(_same(part, b) for part in a.parts)
        case Unordered(kind="list"), Ordered(brackets=","):
            return len(a.parts) == len(b.parts) and all(map(_same, a.parts, b.parts))
        case Operation(sign="∩"), Operation(sign="∩"):
            return _same_parts(list(a.parts), list(b.parts))
        case Operation(), Operation():
            return a.sign == b.sign and len(a.parts) == len(b.parts) and all(map(_same, a.parts, b.parts))
        case Ordered(), Ordered():
            alike = a.brackets == b.brackets and len(a.parts) == len(b.parts)
            return alike and all(map(_same, a.parts, b.parts))
        case Ordered(brackets=":", parts=(*times, Quantity() as last)), Ratio():
            ratio = [time.expression for time in times if isinstance(time, Quantity)]
            return not last.unit.dimensions and _in_ratio(ratio, b.parts)
        case Ratio(), Ratio():
            return not _unlike(a.name, b.name) and _in_ratio(a.parts, b.parts)
        case Ratio(parts=(_, _)), Quantity(sign=""):
            are_alike = not _unlike(a.name, b.name) and not b.unit.dimensions
            return are_alike and _in_ratio(a.parts, (b.expression, constant(1)))
        case Quantity(), Quantity():
            return _same_number(a, b)
        case Quantity(relation=Relation() as relation), Relation():
            return _same_relation(relation, b)
        case Relation(), Relation():
            return _same_relation(a, b)
        case ((Quantity() | Unevaluated()), Unevaluated()):
            # If the value is not known, as for 9^{9^{9^9}}, math-verify would not find it either.
            has_value = isinstance(a, Unevaluated) or bool(a.text and a.expression.values)
            return has_value and _same_by_math_verify(a.text, b.text)
        case Words(), Words():
            return words(a.text) == words(b.text)
    return False


def _same_number(a: Quantity, b: Quantity) -> bool:
    if a.name and b.name and a.name != b.name:
        if a.relation and b.relation and _same_relation(a.relation, b.relation):
            return True  # y = 2x is x = y/2
        if _unlike(a.name, b.name):
            return False
    if (a.whole or b.whole) and identical(a.whole or a.expression, b.whole or b.expression):
        return True
    if a.unit.dimensions and b.unit.dimensions:
        factors = constant(a.unit.factor), constant(b.unit.factor)
        alike = a.unit.dimensions == b.unit.dimensions
        return alike and identical(a.expression * factors[0], b.expression * factors[1])
    return {a.sign, b.sign} != {"%", "°"} and identical(a.expression, b.expression)


def _unlike(a: str, b: str) -> bool:
    """Whether two names certainly stand for different things: unequal single letters do, or unequal ratios."""
    return a != b and (len(a) == len(b) == 1 or (":" in a and ":" in b))


def _distinct(parts: Sequence[Answer]) -> list[Answer]:
    distinct: list[Answer] = []
    for part in parts[:MOST_PARTS]:
        if not any(_same(part, other) for other in distinct):
            distinct.append(part)
    return distinct


def _same_parts(a: list[Answer], b: list[Answer]) -> bool:
    """Whether the parts are the same, in any order."""
    if len(a) != len(b) or len(a) > MOST_PARTS:
        return False
    for part in a:
        at = next((k for k, other in enumerate(b) if _same(part, other)), None)
        if at is None:
            return False
        del b[at]
    return True


def _in_ratio(a: Sequence[Expression], b: Sequence[Expression]) -> bool:
    """Whether a and b have the same proportions; False if any part is 0."""
    if len(a) != len(b) or any(identical(part, constant(0)) for part in (*a, *b)):
        return False
    return all(identical(x * b[0], a[0] * y) for x, y in zip(a[1:], b[1:], strict=True))


def _same_relation(a: Relation, b: Relation) -> bool:
    return a.sign == b.sign and proportional(a.difference, b.difference, positive=a.sign in ("<", "<="))


@lru_cache(maxsize=1024)
def _same_by_math_verify(first: str, second: str) -> bool:
    """Whether math-verify finds two expressions equal; it runs in a process that is killed after `_MATH_VERIFY_S`."""
    import math_verify

    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    status = 1
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, _MATH_VERIFY_S)
        logging.disable()
        config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
        latex = str.maketrans(TABLE["latex"])
        read = [
            math_verify.parse(rf"\boxed{{{text.translate(latex)}}}", config, "no_fallback", parsing_timeout=None)
            for text in (first, second)
        ]
        same = all(read) and math_verify.verify(
            *read, float_rounding=40, numeric_precision=50, strict=True, timeout_seconds=None
        )
        status = 0 if same else 1
    finally:
        os._exit(status)
