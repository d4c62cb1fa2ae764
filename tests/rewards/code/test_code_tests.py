"""The reward of programs: what is right, what is wrong, and what only looks right."""

import json

import pytest
from cheating_programs import CHEATS, WAYS
from reward_helpers import isolated, rows

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.rewards.code.code_tests import code_tests, program_of

pytestmark = pytest.mark.process

SQUARES = ["assert square(2) == 4", "assert square(3) == 9", "assert square(-1) == 1", "assert square(0) == 0"]
RIGHT = "def square(x):\n    return x * x"


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


def reward(program: str, tests: object = SQUARES, entry_point: str | None = None, **settings) -> float | None:
    return code_tests([fenced(program)], [tests], [entry_point], **settings)[0]


@pytest.mark.parametrize(
    "program, expected",
    [
        (RIGHT, 1.0), ("def square(x):\n    return abs(x) * x", 0.75), ("def square(x):\n    return 4", 0.25),
        ("def square(x):\n    return None", 0.0), ("def square(x):\n    return x *", 0.0), ("", 0.0),
        ("def cube(x):\n    return x", 0.0), ("def square(x):\n    while x == 0: pass\n    return x * x", 0.75),
        ("def square(x):\n    print('noise')\n    return x * x\nprint('more')", 1.0),
        ("def größe(x): return x * x  # 平方 🎉\nsquare = größe", 1.0), ("# \ud800\n" + RIGHT, 0.0),
        ("square = lambda x: x * x\nif __name__ == '__main__': raise ValueError", 1.0),
        ("import threading\ndef square(x):\n    threading.Thread(target=print).start()\n    return x * x", 0.0),
    ],
)  # fmt: skip
def test_share_and_all(program: str, expected: float) -> None:
    assert reward(program, timeout_s=2.0) == expected
    assert reward(program, timeout_s=2.0, score="all") == float(expected == 1.0)


def test_no_way_to_compare_values_is_open_to_a_program_that_does_not_know_them() -> None:
    """Plain data used to keep attributes that a program had given it: an OrderedDict with an `issubset` of its own was
    handed the expected value. A StopIteration ended the loop of `map`, and no value was compared."""
    honest = ["def f(x): return x * x", "def f(x): return {x * x}", "def f(x): return str(x * x)"]
    equals = "assert f(2).equals(4)"
    for way in WAYS:
        assert any(reward(program, way) == 1.0 for program in honest) or way == equals, way
    for name, program in CHEATS.items():
        assert reward(program, "\n".join(WAYS), timeout_s=5.0) == 0.0, name


def test_plain_data_comes_back_whole() -> None:
    """What the judge copies keeps its types, order, length and references."""
    program = """
from collections import Counter, OrderedDict, deque
from datetime import datetime, timedelta, timezone
from fractions import Fraction
def f():
    part = [1, {2: (3, None)}]
    moved = OrderedDict(a=part, b=part)
    moved.move_to_end("a")
    ring = [0]
    ring.append(ring)
    return (moved, Counter(b=2, a=-1), deque([1, 2], maxlen=2), Fraction(-3, 7), slice(1, None, part), range(3), ring,
            frozenset({(1, 2)}), {1.5, "x"}, bytearray(b"x"), True,
            datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=1))))
def deep(n): return [deep(n - 1)] if n else []
"""
    tests = """
from collections import *; from datetime import *; from fractions import *
def check(got):
    moved, counter, ring_of_two, third, cut, numbers, ring, frozen, mixed, raw, yes, day = got
    assert list(moved) == ["b", "a"] and type(moved) is OrderedDict and moved["a"] is moved["b"] is cut.step
    assert moved["a"] == [1, {2: (3, None)}] and type(cut) is slice and (cut.start, cut.stop) == (1, None)
    assert counter == Counter(b=2, a=-1) and type(counter) is Counter
    assert ring_of_two == deque([1, 2]) and ring_of_two.maxlen == 2
    assert third == Fraction(-3, 7) and type(third) is Fraction and numbers == range(3) and ring[1] is ring
    assert frozen == frozenset({(1, 2)}) and mixed == {1.5, "x"} and raw == bytearray(b"x") and yes is True
    assert day == datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=1)))
check(f())
check(f())
nested, depth = deep(150), 0
while nested: nested, depth = nested[0], depth + 1
assert depth == 150
"""
    assert reward(program, tests) == 1.0


def test_the_program_is_given_arguments_and_nothing_else() -> None:
    """A completion that stores all it can find finds no expected value: two look the same to it."""
    spy = (
        "import gc\ndef f(x):\n    secret = ''.join(reversed('62951413'))\n    return secret in repr(gc.get_objects())"
    )
    assert reward(spy, ["assert f(1) == 31415926", "assert f(1) is False"]) == 0.5


def test_kinds_of_tests() -> None:
    check = (
        "METADATA = {}\ndef check(candidate):\n    assert candidate([3, 1]) == [1, 3]\n    assert candidate([]) == []\n"
    )
    assert reward("def order(v): return sorted(v)", check, "order") == 1.0
    assert reward("def order(v): return v", check, "order") == 0.0
    assert reward("def order(v): return sorted(v)", check + "check(order)") == 1.0
    loop = "from math import factorial\nfor i in range(5):\n    assert f(i) == factorial(i)\nassert f(2) == 2"
    assert reward("def f(n): return n * f(n - 1) if n else 1", loop) == 1.0
    assert reward("def f(n): return 2", loop) == 0.5
    pytest_like = "from solution import f\ndef test_a():\n    assert f(1) == 1\ndef test_b():\n    assert f(2) == 2\n"
    assert reward("def f(x): return 1", pytest_like) == 0.5
    assert reward("def f(x): return 1", "import solution\nassert solution.f(1) == 1") == 1.0
    cases = (
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = 2\n"
        "    def test_a(self): self.assertEqual(f(self.x), 4)\n"
        "    def test_b(self):\n        with self.assertRaises(ValueError): f(-1)\n"
    )
    assert reward("def f(x):\n    if x < 0: raise ValueError('no')\n    return 2 * x", cases) == 1.0
    assert reward("def f(x): return 2 * x", cases) == 0.5
    assert reward("def sum(a, b): return a + b", ["assert sum(1, 2) == 3"], "sum") == 1.0


def test_values_and_objects_of_the_program() -> None:
    program = """
from collections import namedtuple, Counter, deque
from decimal import Decimal
from enum import IntEnum
class Node:
    def __init__(self, value): self.value, self.next = value, None
    def __iter__(self):
        node = self
        while node: yield node.value; node = node.next
    def __eq__(self, other): return isinstance(other, Node) and self.value == other.value
    def __str__(self): return f"<{self.value}>"
Point = namedtuple("Point", "x y")
Color = IntEnum("Color", "RED")
def sort(v): v.sort()
def count(n):
    i = 0
    while True: yield i; i += 1
def apply(f, x): return f(x)
def same(x): return x
def kinds(): return Counter("aab"), deque([1]), Decimal("1.5"), 2**5000, 1j, b"b", {1: {2}}, frozenset("c"), 1e999
"""
    tests = [
        "n = Node(1); n.next = Node(2)\nassert list(n) == [1, 2] and n.next.value == 2",
        "assert Node(1) == Node(1) and Node(1) != Node(2) and str(Node(3)) == '<3>'",
        "assert not Node(1) == 1",
        "v = [3, 1, 2]; sort(v)\nassert v == [1, 2, 3]",
        "import itertools\nassert list(itertools.islice(count(1), 3)) == [0, 1, 2]",
        "assert apply(lambda x: x + 1, 2) == 3 and apply(len, [1]) == 1",
        "assert (Point(1, 2), Color.RED) == ((1, 2), 1) and Point(1, 2)[1] == 2",
        "from collections import *\nfrom decimal import *\nassert kinds() == "
        "(Counter('aab'), deque([1]), Decimal('1.5'), 2**5000, 1j, b'b', {1: {2}}, frozenset('c'), 1e999)",
        "x = Node(5)\nassert same(x) is x and same([x])[0] is x",
        "try:\n    sort(1)\n    assert False\nexcept AttributeError: pass",
    ]
    for test in tests:
        assert reward(program, [test]) == 1.0, test


def test_inputs_and_outputs() -> None:
    pairs = {"inputs": ["1 2\n", "5 5\n", ["3", "4"]], "outputs": ["3\n", "10", ["7", ""]]}
    adds = "print(sum(int(word) for line in __import__('sys').stdin for word in line.split()), '  ')"
    assert reward(adds, pairs) == 1.0
    assert reward(adds, json.dumps(pairs)) == 1.0
    assert reward("print(3)", pairs) == pytest.approx(1 / 3)
    assert reward("print(3)", pairs, score="all") == 0.0
    assert reward("print(3)\nraise ValueError", pairs) == 0.0
    assert reward("a, b = map(int, input().split())\nprint(a + b)", pairs) == pytest.approx(2 / 3)
    floats = {"inputs": [""], "outputs": ["a 0.3333333333"]}
    assert reward("print('a', 1 / 3)", floats) == 0.0
    assert reward("print('a', 1 / 3)", floats, tolerance=1e-6) == 1.0
    assert reward("print('b', 1 / 3)", floats, tolerance=1e-6) == 0.0
    # All pairs share the time: an endless loop is wrong, not a failure of the reward.
    assert reward("while True: pass", {"inputs": [""] * 50, "outputs": [""] * 50}, timeout_s=0.5) == 0.0


def test_arguments_and_values() -> None:
    calls = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}
    assert reward("def add(a, b): return a + b", calls) == 1.0
    assert reward("class Solution:\n    def add(self, a, b): return a + b", calls) == 1.0
    assert reward("def add(a, b): return (1, 2) if a == [1] else 0", calls) == 0.5
    lines = {"inputs": ["[1, 2]\n3", "[]\n1"], "outputs": ["true", "false"]}
    assert reward("class Solution:\n    def has(self, v, n): return len(v) < n and bool(v)", lines, "has") == 1.0


def test_the_program_in_a_completion() -> None:
    assert program_of("```python\na\n```\ntext\n```python\nb\n```\n```text\nc\n```") == "b\n"
    assert program_of("```\na\n```") == "a\n"
    assert program_of("```py\na\n```\n```\noutput\n```") == "a\n"
    assert program_of("1.\n   ```python\n   if x:\n       y\n   ```") == "if x:\n    y\n"
    assert program_of("````python\n'''\n```\n'''\n````") == "'''\n```\n'''\n"
    assert program_of("```python\nnever closed") is None
    assert program_of("no fence") is None and program_of("") is None
    assert program_of("x = 1", bare=True) == "x = 1" and program_of(" ", bare=True) is None
    chat = [[{"role": "assistant", "content": fenced(RIGHT)}]]
    assert code_tests(chat, [SQUARES]) == [1.0]
    assert code_tests([RIGHT, "", "words"], [SQUARES] * 3) == [0.0] * 3
    assert code_tests([RIGHT, "", "words"], [SQUARES] * 3, fence="optional") == [1.0, 0.0, 0.0]
    assert code_tests([fenced(RIGHT)] * 2, [None, SQUARES]) == [None, 1.0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"score": "most"}, "score 'most' must be"), ({"timeout_s": 0}, "timeout_s 0 must be"),
        ({"memory_mb": 1}, "memory_mb 1 must be"), ({"require": ["files"]}, "'files' is not a protection"),
    ],
)  # fmt: skip
def test_settings_are_checked_before_rows(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        code_tests([], [], **settings)


@pytest.mark.parametrize("tests", ["assert (", "x = 1", "def check(f): assert f()", {"inputs": [1], "outputs": []}])
def test_tests_that_are_none_are_the_data_sets_fault(tests: object) -> None:
    with pytest.raises(ValueError, match="tests of the data set"):
        code_tests([fenced(RIGHT)], [tests])


def test_in_the_worker_processes_of_a_run() -> None:
    """The sandbox of a worker is its own, although the function was imported and checked in another process."""
    texts = [fenced(RIGHT), fenced("def square(x): return 4"), fenced("import os; os._exit(0)"), "nothing"]
    scores = isolated(RewardConfig("code_tests", kwargs={"timeout_s": 5.0})).score(*rows(*texts, tests=[SQUARES] * 4))
    assert scores.reward_B.tolist() == [1.0, 0.25, 0.0, 0.0]
