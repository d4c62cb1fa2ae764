"""The built-in tools, which a configuration names without a path."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from hybrid_grpo.rewards.code.containment import PROTECTIONS, Limits

_LONGEST = 1_000
"""Maximum number of characters in an expression, which bounds the time and the nesting of brackets."""
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_PROGRAM_S = 10.0


def calculator(expression: str) -> str:
    """
    Calculate the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / and brackets, such as (3 + 4.5) * 2
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, KeyError, RecursionError, MemoryError):
        raise ValueError("not an expression of numbers, + - * / and brackets") from None
    return str(value) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: ast.AST) -> Fraction:
    """Return the exact value of a syntax tree; raises KeyError for anything but numbers and the four operations."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if not isinstance(node, ast.BinOp):
        raise KeyError(node)
    return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))


def python(code: str) -> str:
    """
    Run a program in Python, and give back what it prints.

    Args:
        code: the program; it has no network, and no files but its own.
    """
    # Late: only processes that run programs need it.
    from hybrid_grpo.rewards.code.code_tests import own_sandbox

    result = own_sandbox(tuple(PROTECTIONS)).run(code, "", Limits(timeout_s=_PROGRAM_S))
    if result.end == "exited" and result.status == 0:
        return result.stdout
    why = result.stderr.strip().splitlines()[-1:] if result.end == "exited" else [f"ended by {result.end}"]
    return "\n".join(filter(None, [result.stdout, *why]))
