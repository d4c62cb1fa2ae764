r"""Sets of real numbers and their operations: (-∞,∞) \setminus \{3\} is (-∞,3) \cup (3,∞).

To compare two sets, membership is tested at every interval end and single number of either set, at a point between
every two neighboring ones, and at a point beyond each of the outermost ones. Nothing is rewritten or solved.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cmp_to_key
from itertools import pairwise

from hybrid_grpo.rewards.maths import values
from hybrid_grpo.rewards.maths.parser import Answer, Either, Operation, Ordered, Quantity, Relation, Unordered
from hybrid_grpo.rewards.maths.values import Value


@dataclass(frozen=True)
class RealSet:
    """A set that consists of finitely many intervals and single numbers."""

    ends: tuple[Value, ...]
    """The numbers where membership may change."""
    holds: Callable[[Value], bool]
    names: frozenset[str] = frozenset()
    """Variables of the inequalities that describe the set: x > 2 and y > 2 are not the same set."""


def real_set(answer: Answer) -> RealSet | None:
    """The answer as a set, or None if it is not a set of real numbers."""
    match answer:
        case Either(parts=(strict, loose)):
            found = real_set(loose)
            return replace(found, names=strict.difference.names) if found and isinstance(strict, Relation) else found
        case Ordered(brackets="()" | "(]" | "[)" | "[]", parts=(low, high)):
            return _interval(answer.brackets, _real(low), _real(high))
        case Unordered(kind="union"):
            return _combined(answer.parts, any)
        case Unordered(parts=parts):
            return _numbers(parts)
        case Operation(sign="∩"):
            return _combined(answer.parts, all)
        case Operation(sign="⊖"):
            return _combined(answer.parts, lambda held: held[0] and not any(held[1:]))
    return None


def same_set(a: RealSet, b: RealSet) -> bool:
    """Whether both sets have the same members."""
    if len(a.names | b.names) > 1:
        return False
    finite = [end for end in (*a.ends, *b.ends) if not values.context.isinf(end)]
    ends = sorted(finite, key=cmp_to_key(lambda x, y: _below(x, y) - _below(y, x)))
    between = [(x + y) / 2 for x, y in (values.alike(*pair) for pair in pairwise(ends))]
    beyond = [ends[0] - 1, ends[-1] + 1] if ends else [values.wide(0)]
    return all(a.holds(value) == b.holds(value) for value in (*ends, *between, *beyond))


def _interval(brackets: str, low: Value | None, high: Value | None) -> RealSet | None:
    if low is None or high is None:
        return None

    def holds(value: Value) -> bool:
        is_end = brackets[0] == "[" and values.close(value, low), brackets[1] == "]" and values.close(value, high)
        return (_below(low, value) or is_end[0]) and (_below(value, high) or is_end[1])

    return RealSet((low, high), holds)


def _numbers(parts: tuple[Answer, ...]) -> RealSet | None:
    found = [number for part in parts if (number := _real(part)) is not None]
    if len(found) < len(parts):
        return None
    return RealSet(tuple(found), lambda value: any(values.close(value, number) for number in found))


def _combined(parts: tuple[Answer, ...], holds: Callable[[list[bool]], bool]) -> RealSet | None:
    sets = [part for part in map(real_set, parts) if part is not None]
    if len(sets) < len(parts):
        return None
    ends = tuple(end for part in sets for end in part.ends)
    names = frozenset[str]().union(*(part.names for part in sets))
    return RealSet(ends, lambda value: holds([part.holds(value) for part in sets]), names)


def _real(answer: Answer) -> Value | None:
    """Return the answer as a real number or ±∞; None if it has a name, a sign, a unit, variables or no value."""
    if not isinstance(answer, Quantity) or answer.name or answer.sign or answer.unit.dimensions:
        return None
    if answer.expression.names or len(answer.expression.values) != 1:
        return None
    value = answer.expression.values[0]
    is_real = isinstance(value, Fraction | values.context.mpf) and not values.context.isnan(value)
    return value if is_real else None


def _below(a: Value, b: Value) -> bool:
    """Whether a < b by more than the precision of numbers that are not rational."""
    a, b = values.alike(a, b)
    return bool(a < b) and not values.close(a, b)
