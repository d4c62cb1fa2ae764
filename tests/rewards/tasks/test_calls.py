"""Function calls: what is read as one, and which are right. tests/data/test_evaluation_sets.py has the data of BFCL."""

import json

import pytest

from hybrid_grpo.rewards.tasks.calls import calls_of, function_calls

TYPES = {
    **{"n": {"type": "integer"}, "x": {"type": "float"}, "s": {"type": "string"}, "b": {"type": "boolean"}},
    **{"l": {"type": "array", "items": {"type": "float"}}, "d": {"type": "dict"}},
}
FUNCTIONS = [{"name": "a.f", "parameters": {"properties": TYPES, "required": ["n"]}}]
FREE = {
    "x": ["", 2.0], "s": ["", "New York"], "b": ["", True], "l": ["", [1.0, 2.0]],
    "d": ["", {"k": ["v"], "o": ["", 1]}],
}  # fmt: skip


def score(completion: str, *right: dict) -> float | None:
    truth = json.dumps([{"a.f": {**FREE, **options}} for options in right])
    return function_calls([completion], [json.dumps(FUNCTIONS)], [truth])[0]


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ("n=3", 1), ("n=3, x=2", 1), ("n=3, x=2.0", 1), ("n=3.0", 0), ("n='3'", 0), ("n=True", 0), ("x=2.0", 0),
        ("n=4", 0), ("n=3, s='new-york.'", 1), ("n=3, s='York'", 0), ("n=3, b=true", 1), ("n=3, b=1", 0),
        ("n=3, l=[1.0, 2.0]", 1), ("n=3, l=(1.0, 2.0)", 1), ("n=3, l=[1, 2]", 0), (f"n=3, x={10**400}", 0),
        ("n=3, d={'k': 'V'}", 1), ("n=3, d={'k': 'v', 'o': 1}", 1), ("n=3, d={'o': 1}", 0), ("n=3, l=[1.0]", 0),
        ("n=3, d={'k': 'v', 'z': 1}", 0), ("n=3, z=1", 0), ("3", 0), ("", 0), ("**{'n': 3}", 0), ("n=3)(", 0),
    ],
)  # fmt: skip
def test_a_call_has_the_types_and_values_that_are_right(arguments: str, right: int) -> None:
    assert score(f"[a.f({arguments})]", {"n": [3, 5]}) == right


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("[a.f(n=1), a.f(n=2)]", [1, 2]), ("a.f(n=1)", [1]), ("```python\n[a.f(n=1)]\n```", [1]), ("[]", []),
        ("<think>[a.f(n=9)]</think>\n\n[a.f(n=1)]", [1]), ("No function fits.", []), ("", []), ("[a.f(n=1), 2]", []),
        ('Hm: <tool_call>\n{"name": "a.f", "arguments": {"n": 1}}\n</tool_call>', [1]), ("[" * 9999, []),
        ('<tool_call>{"name": "a.f"}</tool_call>', []), ("<tool_call>[1]</tool_call>", []), ("a.f(n=" + "9" * 9999, []),
        (f"a.f(n=0x{'f' * 9999})", []),
    ],
)  # fmt: skip
def test_calls_are_python_or_json_between_tags(text: str, numbers: list[int]) -> None:
    assert calls_of(text) == [("a.f", {"n": number}) for number in numbers]
    assert score(text, *({"n": [number]} for number in reversed(numbers))) == 1, "in any order"
    assert score(text, *({"n": [number]} for number in [*numbers, 7])) == 0


def test_rows_of_other_sources_have_no_score() -> None:
    stored: dict[str, list] = {}
    assert function_calls(["[f(a=1)]"], [None], [None], log_extra=stored.__setitem__) == [None]
    assert stored == {"answer": ["[\"('f', {'a': 1})\"]"]}
