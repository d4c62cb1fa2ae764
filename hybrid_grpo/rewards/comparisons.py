"""Finds out from a reward function's source whether it compares the completions of a call with each other.

Such a function gives other rewards when it is called with one completion at a time. A function that judges each
completion by itself does so in a loop or a comprehension; outside of these, its lists have one element per completion.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

_REDUCTIONS = {"min", "max", "sum", "mean", "fmean", "median", "std", "var", "stdev", "pstdev", "set", "sorted"}
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.FunctionDef)
_REPORTS = {"log_metric", "log_extra", "print", "debug", "info", "warning"}


def comparison(function: Callable[..., Any]) -> str | None:
    """Return the expression by which a function compares the completions of a call; None if it seems to have none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    lists = _lists(tree)
    found = (node for node in _outside_loops(tree.body) if _reduces(node) and _names(node) & lists)
    return next(map(ast.unparse, found), None)


def _lists(tree: ast.AST) -> set[str]:
    """Return the names of lists that are derived from the completions."""
    names = {"completions", "completion_ids", "solution_strs"}
    while True:
        more = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and _names(node.value) & names:
                more |= _names(*(node.targets if isinstance(node, ast.Assign) else [node.target]))
            elif _called(node) == "append":
                more |= _names(node)
        if more <= names:
            return names
        names |= more


def _names(*nodes: ast.AST) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def _outside_loops(nodes: list[Any]) -> Iterator[ast.AST]:
    for node in nodes:
        if not isinstance(node, _LOOPS) and _called(node) not in _REPORTS:
            yield node
            yield from _outside_loops(list(ast.iter_child_nodes(node)))


def _called(node: ast.AST) -> str:
    """Return the last name of the function that a node calls, or no text."""
    called = node.func if isinstance(node, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _reduces(node: ast.AST) -> bool:
    """Whether a node reduces a list to a number, divides by a length, or asks whether a length is above 1."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _called(node.right) == "len"
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(_called(side) == "len" for side in sides) and any(
            isinstance(side, ast.Constant) and side.value in (1, 2) for side in sides
        )
    return _called(node) in _REDUCTIONS and isinstance(node, ast.Call) and len(node.args) == 1
