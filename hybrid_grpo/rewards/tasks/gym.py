"""The built-in reward `gym_answer`: problems of reasoning-gym are checked by the generator that made them."""

import ast
import re
from functools import cache
from typing import Any

from hybrid_grpo.rewards.rules import Completions, LogExtra, completion_texts

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def gym_answer(
    completions: Completions, generator: list[str], problem: list[str], log_extra: LogExtra | None = None
) -> list[float | None]:
    """The generator's score of the completion's answer, 1.0 if it is right; some give parts of it. `stated` finds the
    answer. None if `problem` is None, as in rows of other sources."""
    read = [None if of is None else ast.literal_eval(of) for of in problem]
    texts = completion_texts(completions)
    answers = [of and stated(text, of["answer"]) for text, of in zip(texts, read, strict=True)]
    if log_extra is not None:
        log_extra("answer", answers)
    return [
        None if of is None else _score(name, answer, of)
        for name, answer, of in zip(generator, answers, read, strict=True)
    ]


def stated(text: str, right: str | None) -> str:
    r"""Return what stands in the last `<answer> </answer>`; without this tag in the last `\boxed{}`; without either, if
    the right answer is a number, the last number of the text, and else its last line."""
    if tags := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return str(tags[-1]).strip()
    if boxes := re.findall(r"\\boxed\{([^{}]*)\}", text):
        return str(boxes[-1]).strip()
    if right is not None and _NUMBER.fullmatch(right.strip()):
        numbers = _NUMBER.findall(text)
        return str(numbers[-1]).replace(",", "") if numbers else ""
    return text.strip().rpartition("\n")[2].strip()


@cache
def _checks(generator: str) -> Any:
    from reasoning_gym.factory import get_score_answer_fn

    return get_score_answer_fn(generator)


def _score(generator: str, answer: str | None, problem: dict[str, Any]) -> float:
    try:
        return float(_checks(generator)(answer, problem))
    except Exception:  # some generators cannot read what is no answer: a number with letters, a grid without rows
        return 0.0
