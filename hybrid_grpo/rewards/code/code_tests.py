"""The built-in `code_tests`: the share of tests that a program passes in a sandbox.

The program cannot influence the verdict: asserts run in another process (judge.py), and this module compares outputs.
"""

import ast
import builtins
import json
import math
import symtable
import sys
import textwrap
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import Any, Literal

from hybrid_grpo.rewards.code.containment import PROTECTIONS, Limits
from hybrid_grpo.rewards.code.sandbox import Sandbox
from hybrid_grpo.rewards.rules import Completions, completion_texts

_LANGUAGES = ("python", "python3", "py")
_local = threading.local()


def code_tests(
    completions: Completions, tests: list[Any], entry_point: list[str | None] | None = None, *,
    score: Literal["share", "all"] = "share", fence: Literal["required", "optional"] = "required",
    timeout_s: float = 10.0, memory_mb: int = 512, tolerance: float = 0.0,
    require: Collection[str] = tuple(PROTECTIONS),
) -> list[float | None]:  # fmt: skip
    """Share of tests that the program in a completion passes; 0.0 if there is no program, None if `tests` is None.

    docs/rewards/code.md has the settings, and the formats of tests. In Python tests, names that the tests do not define
    are those of the program, which can also be imported as `solution`. `entry_point` names the tested function, if the
    tests need it. Raises ValueError if a setting is invalid or cannot be met on this machine, or the data set's tests
    are invalid; RuntimeError if the sandbox has failed.
    """
    _check(score, fence, timeout_s, memory_mb, tolerance)
    if not completions:
        with Sandbox() as sandbox:
            sandbox.require(require)
        return []
    sandbox = own_sandbox(require)
    limits = Limits(timeout_s, memory_mb)
    rewards: list[float | None] = []
    for row, text in enumerate(completion_texts(completions)):
        if tests[row] is None:
            rewards.append(None)
            continue
        job = _job(tests[row], None if entry_point is None else entry_point[row])
        program = program_of(text, bare=fence == "optional")
        verdicts = job.verdicts(sandbox, program, limits, tolerance) if program else [False]
        rewards.append(float(all(verdicts)) if score == "all" else fmean(verdicts))
    return rewards


def program_of(text: str, bare: bool = False) -> str | None:
    """Return the last closed block marked as Python, else the last unmarked one, else, if `bare`, the whole text."""
    fence, language = "", ""
    block: list[str] = []
    found: dict[bool, str] = {}
    for line in text.splitlines():
        start = line.strip()
        if not fence and start.startswith("```"):
            fence = start[: len(start) - len(start.lstrip("`"))]
            language, block = start[len(fence) :].strip().lower(), []
        elif fence and start == fence:
            if language in ("", *_LANGUAGES):
                found[language == ""] = textwrap.dedent("\n".join(block)) + "\n"
            fence = ""
        else:
            block.append(line)
    program = found.get(False, found.get(True))
    return text if program is None and bare and "```" not in text and text.strip() else program


class _Asserts:
    """Tests written in Python."""

    def __init__(self, text: str, entry_point: str | None) -> None:
        try:
            parts = _parts(ast.parse(text), entry_point)
            names = _names_of_the_program(text, entry_point)
        except SyntaxError as error:
            line = (error.text or "").strip()
            raise ValueError(f"tests of the data set are not Python: {error.msg}: {line}") from error
        self._count = sum(counts for _, counts in parts)
        if not self._count:
            raise ValueError(f"tests of the data set test nothing: {text[:80]!r}: give asserts, or entry_point")
        # The tests import standard modules themselves: the program could provide others under their names.
        used = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        modules = sorted(names & sys.stdlib_module_names & {node.id for node in used if isinstance(node, ast.Name)})
        parts = [(f"import {name}", False) for name in modules] + parts
        self._order = json.dumps({"names": sorted(names - set(modules)), "parts": parts})

    def verdicts(self, sandbox: Sandbox, program: str, limits: Limits, tolerance: float) -> list[bool]:
        reached = sandbox.test(program, self._order, limits)
        return [*reached, *[False] * self._count][: self._count]


class _Pairs:
    """Tests given as standard input and expected output."""

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._pairs = [(_lines(given), _lines(expected)) for given, expected in zip(inputs, outputs, strict=True)]

    def verdicts(self, sandbox: Sandbox, program: str, limits: Limits, tolerance: float) -> Iterator[bool]:
        """Run the program once per test, and yield for each test whether the program passes it."""
        deadline = time.monotonic() + limits.timeout_s
        for given, expected in self._pairs:
            left_s = deadline - time.monotonic()
            run = sandbox.run(program, given, replace(limits, timeout_s=left_s)) if left_s > 0 else None
            yield run is not None and run.status == 0 and run.end == "exited" and _same(run.stdout, expected, tolerance)


def _check(score: str, fence: str, timeout_s: float, memory_mb: int, tolerance: float) -> None:
    for problem, wrong in (
        (f"score {score!r} must be share or all", score not in ("share", "all")),
        (f"fence {fence!r} must be required or optional", fence not in ("required", "optional")),
        (f"timeout_s {timeout_s} must be above 0", not 0 < timeout_s < math.inf),
        (f"memory_mb {memory_mb} must be 64 or more", memory_mb < 64),
        (f"tolerance {tolerance} must be 0 or more", not 0 <= tolerance < math.inf),
    ):
        if wrong:
            raise ValueError(problem)


def own_sandbox(require: Collection[str]) -> Sandbox:
    """Return the sandbox of this thread, started if necessary; raises ValueError if a protection is not in force."""
    sandbox = getattr(_local, "sandbox", None)
    if sandbox is None or not sandbox.usable:
        sandbox = _local.sandbox = Sandbox()
    sandbox.require(require)
    return sandbox


def _job(tests: Any, entry_point: str | None) -> _Asserts | _Pairs:
    if isinstance(tests, str) and tests.lstrip().startswith("{"):
        tests = json.loads(tests)
    if isinstance(tests, dict):
        name = tests.get("fn_name") or entry_point
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not inputs or not outputs or len(inputs) != len(outputs):
            raise ValueError("tests of the data set must have as many inputs as outputs, and at least one")
        return _asserts(_calls(name, inputs, outputs), None) if name else _Pairs(inputs, outputs)
    if not isinstance(tests, str):
        tests = "\n".join(tests)
    return _asserts(tests, entry_point)


_asserts = lru_cache(maxsize=1024)(_Asserts)
"""Makes `_Asserts`, with a cache because all completions of a prompt have the same tests."""


def _parts(module: ast.Module, entry_point: str | None) -> list[tuple[str, bool]]:
    """Return the statements of the tests, and calls of test functions if needed; True marks those that are tests."""
    definitions = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    testing = {name for name, node in functions.items() if _has_test(node, set())}
    tests = {node for node in module.body if not isinstance(node, definitions) and _has_test(node, testing)}
    parts = [(ast.unparse(node), node in tests) for node in module.body]
    if tests:
        return parts
    if "check" in functions and entry_point:
        return [*parts, (f"check({entry_point})", True)]
    parts += [(f"{name}()", True) for name in functions if name.startswith("test")]
    for node in module.body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("TestCase") for base in node.bases):
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            parts += [(f"{node.name}({name!r}).debug()", True) for name in methods if name.startswith("test")]
    return parts


def _has_test(node: ast.AST, testing: set[str]) -> bool:
    """Whether a statement contains an assert, or calls a function whose name is in `testing`."""
    calls = {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return bool(calls & testing) or any(isinstance(child, ast.Assert) for child in ast.walk(node))


def _names_of_the_program(text: str, entry_point: str | None) -> set[str]:
    """Return names that the tests use but do not define. Builtins are excluded: the program could redefine `sorted`."""
    top = symtable.symtable(text, "<tests>", "exec")
    defined = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    used: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        used |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table is top or s.is_global())}
        tables += table.get_children()
    imported: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "solution":
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "solution":
            imported.add(node.attr)
    return (used - defined - set(dir(builtins))) | imported | ({entry_point} if entry_point else set())


_CALLS = """
import json as _json
def _plain(value):
    return _json.loads(_json.dumps(value))
def _agree(value, expected):
    value = _plain(value)
    return value == expected or isinstance(expected, list) and expected == [value]
try:
    _function = getattr(Solution(), {name!r})
except (NameError, AttributeError):
    _function = {name}
"""
"""Code before the asserts that compare values. JSON has no tuples, and APPS wraps some values in a list of one."""


def _calls(name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> str:
    asserts = [
        f"assert _agree(_function(*{_decoded(given, each_line=True)!r}), _plain({_decoded(expected)!r}))"
        for given, expected in zip(inputs, outputs, strict=True)
    ]
    return _CALLS.format(name=name) + "\n".join(asserts)


def _decoded(value: Any, each_line: bool = False) -> Any:
    """Decode the JSON of LiveCodeBench: with `each_line`, one argument per line; otherwise a single value."""
    if not isinstance(value, str):
        return value
    return [json.loads(line) for line in value.splitlines() if line.strip()] if each_line else json.loads(value)


def _lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list | tuple) else str(text)


def _same(output: str, expected: str, tolerance: float) -> bool:
    """Whether each line has the same words, or numbers within `tolerance`; trailing empty lines are ignored."""
    ours, theirs = ([line.split() for line in text.rstrip().splitlines()] for text in (output, expected))
    return list(map(len, ours)) == list(map(len, theirs)) and all(
        x == y or (tolerance > 0 and _near(x, y, tolerance))
        for a, b in zip(ours, theirs, strict=True)
        for x, y in zip(a, b, strict=True)
    )


def _near(a: str, b: str, tolerance: float) -> bool:
    try:
        return math.isclose(float(a), float(b), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False
