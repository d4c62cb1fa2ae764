"""The built-in reward `countdown`: a completion must combine given numbers into an expression with a given value.

Expressions are parsed by Python but not executed; values are exact fractions.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from numbers import Real
from typing import Any

from hybrid_grpo.rewards.rules import Completions, completion_texts

_LONGEST = 500
"""Maximum length of an expression in characters, which bounds the parsing time and the depth of nesting."""
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
    """1.0 if the completion gives an expression of the numbers `nums` whose value is `target`, else 0.0.

    The expression is in the last `<answer> </answer>`; without this tag, it is the whole completion. Anything after a
    `=` is ignored. It consists of whole numbers, + - * / and parentheses, and uses every number of `nums` exactly once
    (at most once if `use_all` is false). Values are exact: 8 / (3 - 8 / 3) is 24. None if `target` is None. Raises
    ValueError if `nums` is not a list of numbers, or `target` not a number.
    """
    return [
        None if goal is None else float(_solves(_expression(text), numbers, goal, use_all))
        for text, numbers, goal in zip(completion_texts(completions), nums, target, strict=True)
    ]


def _expression(text: str) -> str:
    before, opened, answer = text.rpartition("<answer>")
    text = answer.partition("</answer>")[0] if opened else before or answer
    text = text.partition("=")[0].strip()
    for spelling, sign in _SPELLINGS.items():
        text = text.replace(spelling, sign)
    return text


def _solves(expression: str, nums: Any, target: Any, use_all: bool) -> bool:
    if not isinstance(nums, (list, tuple)) or not all(isinstance(number, Real) for number in (*nums, target)):
        raise ValueError(f"nums {nums!r:.40} must be a list of numbers, and target {target!r:.20} a number")
    read = evaluate(expression)
    if read is None:
        return False
    value, used = read
    return value == target and (Counter(used) == Counter(nums) if use_all else Counter(used) <= Counter(nums))


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """Return the value of an expression and the numbers in it; None if it is not a valid expression.

    It may have whole numbers, + - * / and parentheses, but no signs: -3 is not one of the given numbers.
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
    """The value of a syntax tree; raises KeyError for anything but numbers and the four operations."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise KeyError(node)
    return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
