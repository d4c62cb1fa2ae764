"""The numbers game: an expression over given numbers with a given value.

Python parses the expression and nothing is run as code; values are exact fractions.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from hybrid_grpo.rewards.rules import Completions, completion_texts

_LONGEST = 500
"""Characters of an expression; bounds the time, and how deep its brackets can be."""
_SPELLINGS = {"\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", r"\times": "*", r"\cdot": "*", r"\div": "/"}
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown(
    completions: Completions, nums: list[Any], target: list[Any], *, use_all: bool = True
) -> list[float | None]:
    """1.0 where the completion gives an expression of the numbers `nums` whose value is `target`, else 0.0.

    The expression stands in the last `<answer> </answer>`, or, without one, is the whole completion; the part after a
    `=` is ignored. It consists of whole numbers, + - * / and parentheses, with every number of `nums` exactly once.
    Values are exact fractions: 8 / (3 - 8 / 3) is 24. None where `target` is None. With `use_all` False numbers may be
    left out.
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

    A sign before a number makes the expression invalid: the numbers of the game are given, and -3 is not 3.
    """
    if len(expression) > _LONGEST or not re.fullmatch(r"[-+*/()0-9\s]*", expression):
        return None
    numbers = re.findall(r"[0-9]+", expression)
    if any(len(number) > 9 for number in numbers):
        return None
    plain = re.sub(r"\b0+(?=[0-9])", "", " ".join(expression.split()))
    try:
        return _value(ast.parse(plain, mode="eval").body), list(map(int, numbers))
    except (SyntaxError, ArithmeticError, KeyError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> Fraction:
    """The value of a syntax tree; KeyError where it holds anything but numbers and the four operations."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise KeyError(node)
    return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
