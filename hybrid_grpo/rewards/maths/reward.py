r"""Rewards for final answers of mathematical problems (GSM8K, MATH): where one is stated, and whether it is right."""

import re
from collections.abc import Callable
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

from hybrid_grpo.rewards.maths.grading import is_mathematical, same_answer
from hybrid_grpo.rewards.maths.notation import LONGEST
from hybrid_grpo.rewards.maths.numeric import last_number_in, parse_number
from hybrid_grpo.rewards.rules import Completions, LogExtra, completion_texts

_HAS_MATH_VERIFY = find_spec("math_verify") is not None


def math_answer(
    completions: Completions, answer: list[Any], *, boxed_only: bool = False, log_extra: LogExtra | None = None
) -> list[float | None]:
    r"""1.0 where the final answer that a completion states is mathematically the column `answer`, else 0.0.

    **Where it is stated.** Only text after the last `</think>` counts. The answer stands in the last `\boxed{}`, or
    after a later `####` (words there are a heading). Boxes that only `,`, `and`, `or` or `x =` separate are one list.
    Without such a mark it stands in the last `<answer>` tag, else after the last "answer is" or "Answer:", else in the
    words after `####`. With `boxed_only` nothing but a box counts. A last box that is not closed states nothing, nor
    does a number that merely occurs.

    **What it must be.** The gold answer is bare, or a worked solution that ends in `####` or holds `\boxed{}`. Values
    are compared, not their notation (2/4 is 0.5), and exactly (0.333 is not 1/3); docs/rewards/maths.md has the
    conventions. math-verify works out gold answers that have a sum, an integral or a limit, within seconds; everything
    else is compared here. The function does not apply where `answer` is None. Raises ValueError where
    math-verify is not installed, or an answer of the data set is empty.
    """
    if not _HAS_MATH_VERIFY:
        raise ValueError("math_answer needs math-verify: pip install 'hybrid_grpo[math]'")
    golds = [None if gold is None else gold_answer(gold) for gold in answer]
    stated = [stated_answer(text, boxed_only) for text in completion_texts(completions)]
    if log_extra is not None:
        log_extra("answer", stated)
    return [
        None if gold is None else float(text is not None and same_answer(text, gold))
        for text, gold in zip(stated, golds, strict=True)
    ]


def gold_answer(gold: Any) -> str:
    """The answer that a data set gives: bare, or stated in a worked solution; raises ValueError where it is empty."""
    text = str(gold).strip()
    stated = next((found for find in (_marked, _headed) if (found := find(text)) is not None), text).strip()
    if not stated:
        raise ValueError(f"answer {gold!r} of the data set is empty")
    return stated


def stated_answer(text: str, boxed_only: bool = False) -> str | None:
    """The text of the final answer that a completion states, or None; `math_answer` says where it stands."""
    text = text.rpartition("</think>")[2]
    finders = (_boxed,) if boxed_only else (_marked, _tagged, _phrased, _headed)
    return next((found for find in finders if (found := find(text)) is not None), None)


def numeric_answer(
    completions: Completions, answer: list[Any], *, last_number: bool = False, log_extra: LogExtra | None = None
) -> list[float | None]:
    r"""1.0 where the number that the completion states as its answer equals the column `answer`, else 0.0.

    A completion states it as for `math_answer`, after `####` (GSM8K, arXiv:2110.14168) or in `\boxed{}`. With
    `last_number`, the last number of a completion that marks none counts. `parse_number` says which notations are
    understood; the comparison is exact.

    `answer` is a number, the text of one, or a worked solution that itself ends in `####` or `\boxed{}`. The function
    does not apply where it is None, and raises ValueError where it is not a number.
    """
    golds = [None if gold is None else _gold_number(gold) for gold in answer]
    stated = [stated_number(text, last_number) for text in completion_texts(completions)]
    if log_extra is not None:
        log_extra("answer", [None if number is None else str(number) for number in stated])
    return [None if gold is None else float(number == gold) for number, gold in zip(stated, golds, strict=True)]


def stated_number(text: str, last_number: bool = False) -> Fraction | None:
    """The number that a text marks as its answer, or None; see `numeric_answer`."""
    marked = _marked(text, lambda line: parse_number(line) is not None)
    number = None if marked is None else parse_number(marked)
    return last_number_in(text) if number is None and last_number else number


def _gold_number(gold: Any) -> Fraction:
    if not isinstance(gold, str):
        # str gives the shortest decimal of a float: 0.1 in the data is the number 0.1, not its binary neighbour.
        return Fraction(str(gold))
    number = parse_number(gold)
    number = stated_number(gold) if number is None else number
    if number is None:
        raise ValueError(f"answer {gold!r} is not a number, and states none after #### or in \\boxed{{}}")
    return number


_BOX = re.compile(r"\\f?box(?:ed)?\s*(?:\{|(?<=boxed)\s+(?=[^\s{]))")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t:]*([^\n]*)")
_TAG = re.compile(r"<answer>([^<]{0,2000})</answer>")
_PHRASE = re.compile(
    r"\banswers?\b[*_]*(?:\s(?:to|for|of)\b[^.\n:]{0,80}?)?(?:\s(?:is|are|was)\b[*_]*\s?[:=]?|\s?[:=])[*_\s]*"
    r"(?:(?:\$\$|\\\[)\s*)?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\.(?=\s|$|[*_$])|\n|,?\s(?:because|since|as|which|where|so|I hope)\b")
_JOINT = re.compile(r"and|or|as well as|,|;")
_JOINED = re.compile(
    r"[\s$,;()\\]*(?:and(?: also)?|or|as well as|and the other(?: one| root| solution| value)?(?: is)?)?[\s$()\\]*"
    r"(?:[A-Za-z](?:_\w)?\s*=\s*)?[\s$]*"
)
_SPACING = re.compile(r"\\(?:q?quad|text|textrm|mathrm|mbox|hspace)(?![A-Za-z])|\\[,;:! ]|[{}~]")
"""Spacing and the commands of text between two boxes: \\quad \\text{and} is "and"."""
_LONGEST_JOINT, _MOST_JOINED, _MOST_HEADINGS = 60, 20, 20


def _marked(text: str, is_answer: Callable[[str], bool] = is_mathematical) -> str | None:
    """The answer in a box, or after a `####` after all boxes; a line that is not an answer is a heading."""
    end = max((box.end() for box in _BOX.finditer(text)), default=0)
    lines = _after_hashes(text[end:])[-_MOST_HEADINGS:]
    return next((line for line in reversed(lines) if is_answer(line)), None) or _boxed(text)


def _headed(text: str) -> str | None:
    """The text after the last `####`, words or not."""
    return next(reversed(_after_hashes(text)), None)


def _after_hashes(text: str) -> list[str]:
    return [line for match in _HASHES.finditer(text) if (line := match[1].strip())]


def _boxed(text: str) -> str | None:
    """The content of the last box and of those that are joined to it, as a list.

    Empty where one of them is not closed, or where far too many are joined; None where there is no box.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    content, _ = _content(text, boxes[-1])
    contents, begin = [content], boxes[-1].start()
    for box in boxes[-2::-1]:
        if len(contents) == _MOST_JOINED:
            return ""
        content, after = _content(text, box)
        between = text[after:begin]
        between = _SPACING.sub(" ", between) if len(between) <= _LONGEST_JOINT else ""
        if not _JOINED.fullmatch(between) or not _JOINT.search(between):
            break
        contents, begin = [content, *contents], box.start()
    return "" if "" in contents else ", ".join(contents)


def _content(text: str, box: re.Match[str]) -> tuple[str, int]:
    """The content of a box, and where the box ends; empty where it is not closed, or holds far too much."""
    if not box[0].endswith("{"):
        content = re.compile(r"[^\s$]+").match(text, box.end())
        return (content[0], content.end()) if content else ("", box.end())
    depth = 1
    for brace in _BRACE.finditer(text, box.end(), box.end() + 4 * LONGEST):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[box.end() : brace.start()].strip(), brace.end()
    return "", len(text)


def _tagged(text: str) -> str | None:
    return next(reversed(_TAG.findall(text)), None)


def _phrased(text: str) -> str | None:
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() : matches[-1].end() + LONGEST]
    end = _SENTENCE_END.search(rest)
    return rest[: end.start()] if end else rest
