"""Tasks on published data sets. Each function converts a row that has the original columns."""

import string
from typing import Any

from hybrid_grpo.config.tasks import Row, column, text


def gsm8k(row: Row) -> Row:
    """Convert a row with the columns question and answer (a solution that ends with, for example, `#### 42`)."""
    solution = text(row, "answer")
    ask = 'Think step by step, then give the final answer as a number behind "####".'
    return {"prompt": f"{text(row, 'question')}\n\n{ask}", "answer": solution, "completion": solution}


def math(row: Row) -> Row:
    r"""Convert a row with the columns problem, solution (with its answer in `\boxed{}`) and, optionally, answer."""
    solution = text(row, "solution", "answer")
    if row.get("answer") is None and r"\boxed" not in solution:
        raise ValueError(r"has no answer, and its solution has none in \boxed{}")
    ask = r"Reason step by step, and put the final answer in \boxed{}."
    answer = solution if row.get("answer") is None else row["answer"]
    return {"prompt": f"{text(row, 'problem')}\n\n{ask}", "answer": answer, "completion": solution}


def multiple_choice(row: Row) -> Row:
    """Convert a row with the columns question, choices ({text, label}) and answerKey, as in ARC; or question, choices
    and answer (an index), as in MMLU, arXiv:2009.03300."""
    texts, labels = _choices(column(row, "choices"))
    letters = list(string.ascii_uppercase[: len(texts)])
    letter = _letter(column(row, "answerKey", "answer"), texts, labels)
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, texts, strict=True))
    ask = 'Think step by step, then finish with "The answer is (X)", where X is the letter of the right choice.'
    return {
        "prompt": f"{text(row, 'question')}\n\n{listed}\n\n{ask}", "answer": letter, "choices": texts,
        "completion": f"The answer is ({letter}).",
    }  # fmt: skip


def _choices(value: Any) -> tuple[list[str], list[str]]:
    texts, labels = (value.get("text"), value.get("label")) if isinstance(value, dict) else (value, None)
    if not isinstance(texts, list) or not 2 <= len(texts) <= 26:
        raise ValueError(f"has choices {value!r:.60}, where a list of 2 to 26 texts is expected")
    labels = list(string.ascii_uppercase[: len(texts)]) if labels is None else labels
    return list(map(str, texts)), list(map(str, labels))


def _letter(answer: Any, texts: list[str], labels: list[str]) -> str:
    """Return the letter of the answer, which is given as a label, an index from 0, or a text."""
    for known in (labels, range(len(texts)), texts):
        if answer in known and not isinstance(answer, bool):
            return string.ascii_uppercase[known.index(answer)]
    raise ValueError(f"has answer {answer!r:.40}, which is not a label, index or text of its {len(texts)} choices")


def code(row: Row) -> Row:
    """Convert a row with the columns of MBPP (text or prompt, test_list, code), of HumanEval, arXiv:2107.03374 (prompt,
    test), or of APPS, arXiv:2105.09938 (question, input_output), or with the columns prompt and tests."""
    tests = column(row, "tests", "test_list", "test", "input_output")
    ask = "Write Python code that solves it, in one ```python block."
    asserts = row.get("test_list")
    if isinstance(asserts, list) and asserts and tests is asserts:
        setup = [*(row.get("test_imports") or []), row.get("test_setup_code") or ""]
        # Nothing else names the function; the other tests stay hidden.
        ask += f" It has to pass this test, among others:\n\n{asserts[0]}"
        tests = [*filter(None, setup), *asserts]
    solution = row.get("code")
    target = {} if solution is None else {"completion": f"```python\n{solution.strip()}\n```"}
    return {"prompt": f"{text(row, 'prompt', 'text', 'question')}\n\n{ask}", "tests": tests, **target}
