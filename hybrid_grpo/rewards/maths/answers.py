r"""The built-in rewards `math_answer` and `numeric_answer`: they find a completion's final answer and judge it.

`math_answer` compares values (parser.py, grader.py). `numeric_answer` compares plain numbers and reads no expressions:
0.5, 1/2 and \frac{1}{2} are the same number, 0.333 is not 1/3, and 2+3, \sqrt{4} and 1e3 are not numbers.
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from importlib.util import find_spec
from numbers import Number
from typing import Any

from hybrid_grpo.rewards.maths.grader import is_mathematical, same_answer
from hybrid_grpo.rewards.maths.notation import LONGEST, bare, clean
from hybrid_grpo.rewards.rules import Completions, LogExtra, compared, completion_texts, gold_answers

_HAS_MATH_VERIFY = find_spec("math_verify") is not None


def math_answer(
    completions: Completions, answer: list[Any], *, boxed_only: bool = False, log_extra: LogExtra | None = None
) -> list[float | None]:
    r"""1.0 if the final answer of a completion is mathematically equal to the column `answer`, else 0.0.

    **Where the answer is.** Only text after the last `</think>` counts. The answer is in the last `\boxed{}`, or
    follows a later `####` (which is a heading if only words follow). Boxes separated only by `,`, `and`, `or` or `x =`
    form a list. Failing that, the answer is in the last `<answer>` tag; failing that, it follows the last "answer is"
    or "Answer:"; failing that, it is whatever follows the last `####`. With `boxed_only`, only a box counts. If the
    last box is not closed, there is no answer. A number that merely occurs in the text is not an answer.

    **What it must equal.** The column holds a bare answer, a worked solution whose answer follows `####` or is in
    `\boxed{}`, or a list of these, any of which is right. Values are compared by the conventions of
    docs/rewards/maths.md. None if `answer` is None. Raises ValueError if math-verify is not installed, or an answer in
    the data set is empty or neither text nor a number.
    """
    if not _HAS_MATH_VERIFY:
        raise ValueError("math_answer needs math-verify: pip install 'hybrid_grpo[math]'")
    references = [gold_answers(gold, _reference) for gold in answer]
    stated = [stated_answer(text, boxed_only) for text in completion_texts(completions)]
    return compared(stated, references, log_extra, same_answer)


def _reference(gold: Any) -> str:
    """Return the answer that the data set gives, either by itself or within a worked solution."""
    if not isinstance(gold, (str, Number)) or isinstance(gold, bool):
        raise ValueError(f"answer {gold!r:.40} of the data set is neither text nor a number")
    text = str(gold).strip()
    stated = next((found for find in (_marked, _after_last_hashes) if (found := find(text)) is not None), text).strip()
    if not stated:
        raise ValueError(f"answer {gold!r} of the data set is empty")
    return stated


def stated_answer(text: str, boxed_only: bool = False) -> str | None:
    """The final answer that a completion states, as text; None if it states none. See `math_answer`."""
    text = text.rpartition("</think>")[2]
    tagged = next(reversed(_TAG.findall(text)), None)
    finders = (_boxed,) if boxed_only else (_marked, lambda _: tagged, _phrased, _after_last_hashes)
    return next((found for find in finders if (found := find(text)) is not None), None)


def numeric_answer(
    completions: Completions, answer: list[Any], *, last_number: bool = False, log_extra: LogExtra | None = None
) -> list[float | None]:
    r"""1.0 if the number that the completion gives as its answer equals the column `answer`, else 0.0.

    The number follows `####` (GSM8K, arXiv:2110.14168) or is in `\boxed{}`. With `last_number`, the last number in a
    completion counts if none is marked. `parse_number` lists the notations that are understood; comparison is exact.

    `answer` is a number, a number as text, or a worked solution that marks a number in the same way, or a list of
    these, any of which is right. The result is None if `answer` is None. Raises ValueError if `answer` gives no number.
    """
    references = [gold_answers(gold, _reference_number) for gold in answer]
    return compared([stated_number(text, last_number) for text in completion_texts(completions)], references, log_extra)


def stated_number(text: str, last_number: bool = False) -> Fraction | None:
    """Return the number that a completion gives as its answer, or None; see `numeric_answer`."""
    marked = _marked(text, lambda line: parse_number(line) is not None)
    number = None if marked is None else parse_number(marked)
    if number is not None or not last_number:
        return number
    numbers = [found for found in _INSIDE.finditer(text) if len(found[0]) <= _LONGEST]
    return _value(numbers[-1]) if numbers else None


def _reference_number(gold: Any) -> Fraction:
    number = None
    if isinstance(gold, str):
        number = parse_number(gold)
        number = stated_number(gold) if number is None else number
    elif isinstance(gold, int | float) and not isinstance(gold, bool) and math.isfinite(gold):
        # str gives the shortest decimal of a float: 0.1 in the data is the number 0.1, not its binary neighbor.
        number = Fraction(str(gold))
    if number is None:
        raise ValueError(f"answer {gold!r:.40} is not a number and gives none after #### or in \\boxed{{}}")
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
"""Spacing and text commands of LaTeX between two boxes; they are removed: \\quad \\text{and} becomes "and"."""
_LONGEST_JOINT, _MOST_JOINED, _MOST_HEADINGS = 60, 20, 20


def _marked(text: str, is_answer: Callable[[str], bool] = is_mathematical) -> str | None:
    """Return the answer at the last `####` that follows all boxes and is no heading, or else that in the last box."""
    end = max((box.end() for box in _BOX.finditer(text)), default=0)
    lines = _after_hashes(text[end:])[-_MOST_HEADINGS:]
    return next((line for line in reversed(lines) if is_answer(line)), None) or _boxed(text)


def _after_last_hashes(text: str) -> str | None:
    return next(reversed(_after_hashes(text)), None)


def _after_hashes(text: str) -> list[str]:
    return [line for match in _HASHES.finditer(text) if (line := match[1].strip())]


def _boxed(text: str) -> str | None:
    """Return the content of the last box and of the boxes joined to it, separated by commas; None if there is no box.
    The result is empty if one of these boxes is not closed, or if too many are joined."""
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
    """Return a box's content and the position of its end; the content is empty if the box is unclosed or too long."""
    if not box[0].endswith("{"):
        content = re.compile(r"[^\s$]+").match(text, box.end())
        return (content[0], content.end()) if content else ("", box.end())
    depth = 1
    for brace in _BRACE.finditer(text, box.end(), box.end() + 4 * LONGEST):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[box.end() : brace.start()].strip(), brace.end()
    return "", len(text)


def _phrased(text: str) -> str | None:
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() : matches[-1].end() + LONGEST]
    end = _SENTENCE_END.search(rest)
    return rest[: end.start()] if end else rest


_DECIMAL = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_QUOTIENT = rf"(?P<top>{_DECIMAL})(?:\s?/\s?(?P<bottom>{_DECIMAL}))?"
_WHOLE = re.compile(rf"(?P<sign>[-+]?)\s?{_QUOTIENT}\s?[%°]?(?:\s+(?!(?:and|or)\b)[A-Za-z][A-Za-z /.-]*)?")
# A sign after a digit, letter or bracket is a subtraction; digits next to '/', '.' or ',' are part of a date or list.
_INSIDE = re.compile(rf"(?:(?<![\w)\]])(?P<sign>[-+\u2212])[$€£¥]?)?(?<![\w/.,]){_QUOTIENT}(?![\w/]|[.,][0-9])")
_FRAC = re.compile(r"(?<![0-9])\\frac\s?\{\s?(-?[0-9.,]+)\s?\}\s?\{\s?([0-9.,]+)\s?\}(?![0-9])")
_LONGEST = 100  # characters of a number: int() refuses, and takes quadratic time for, runs of thousands of digits


def parse_number(text: str) -> Fraction | None:
    r"""Return the number that `text` consists of, or None. Apart from the notation that `clean` removes, the text may
    have a sign, thousands commas, decimals, a/b or \frac{a}{b}, a currency sign, a percent or degree sign (dropped: 50%
    is 50) and a unit. If it has anything else, such as a second number, the result is None."""
    if len(text) > _LONGEST:
        return None
    match = _WHOLE.fullmatch(_FRAC.sub(r"\1/\2", bare(clean(text))))
    return None if match is None else _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    top, bottom = (Fraction((match[part] or "1").replace(",", "").rstrip(".")) for part in ("top", "bottom"))
    if bottom == 0:
        return None
    return top / bottom if match["sign"] in (None, "", "+") else -top / bottom
