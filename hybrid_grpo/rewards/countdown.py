"""The numbers game: an expression over given numbers with a given value. Exact, and nothing is evaluated as code."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from hybrid_grpo.rewards.rules import Completions, completion_texts

_LONGEST = 500
"""Characters of an expression; bounds the time and the depth of its brackets."""
_TOKEN = re.compile(r"\s*([0-9]{1,9}|[-+*/()])")
_SPELLINGS = {"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", r"\times": "*", r"\cdot": "*", r"\div": "/"}
_OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_RANKS = {"+": 1, "-": 1, "*": 2, "/": 2}


def countdown(
    completions: Completions, nums: list[Any], target: list[Any], *, use_all: bool = True
) -> list[float | None]:
    """1.0 where the completion gives an expression of the numbers `nums` whose value is `target`, else 0.0.

    The expression is in the last `<answer> </answer>`, or, where there is none, is the whole completion; what follows a
    `=` in it is not looked at. It has whole numbers, + - * / and parentheses; every number of `nums` stands in it
    exactly once. Values are exact fractions: 8 / (3 - 8 / 3) is 24. None where `target` is None.

    Args:
        use_all: False allows numbers to be left out.
    """
    return [
        None if goal is None else float(_solves(_expression(text), Counter(numbers), goal, use_all))
        for text, numbers, goal in zip(completion_texts(completions), nums, target, strict=True)
    ]


def _expression(text: str) -> str:
    before, opened, answer = text.rpartition("<answer>")
    text = answer.partition("</answer>")[0] if opened else before or answer
    text = text.partition("=")[0].strip()
    for spelling, sign in _SPELLINGS.items():
        text = text.replace(spelling, sign)
    return text


def _solves(expression: str, numbers: Counter[int], target: int, use_all: bool) -> bool:
    read = evaluate(expression)
    if read is None:
        return False
    value, used = read
    return value == target and (Counter(used) == numbers if use_all else Counter(used) <= numbers)


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Value of an expression of whole numbers, + - * / and parentheses, and its numbers; None where it is none.

    A sign before a number is no part of it: the numbers of the game are given, and -3 is not 3.
    """
    if len(expression) > _LONGEST:
        return None
    tokens = _TOKEN.findall(expression)
    if "".join(tokens) != re.sub(r"\s", "", expression):
        return None
    # Two stacks (Dijkstra's shunting yard); `operand` is whether a number or a bracket has to come next.
    values: list[Fraction] = []
    signs: list[str] = []
    operand = True

    def reduce(rank: int) -> bool:
        while signs and signs[-1] != "(" and _RANKS[signs[-1]] >= rank:
            sign, right, left = signs.pop(), values.pop(), values.pop()
            if sign == "/" and right == 0:
                return False
            values.append(_OPERATIONS[sign](left, right))
        return True

    for token in tokens:
        if operand != (token == "(" or token.isdigit()):
            return None
        if token.isdigit():
            values.append(Fraction(int(token)))
            operand = False
        elif token == "(":
            signs.append(token)
        elif token == ")":
            if not reduce(1) or not signs:
                return None
            signs.pop()
        else:
            if not reduce(_RANKS[token]):
                return None
            signs.append(token)
            operand = True
    if operand or "(" in signs or not reduce(1):
        return None
    return values[0], [int(token) for token in tokens if token.isdigit()]
