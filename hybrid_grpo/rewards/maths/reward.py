r"""Whether the final answer of a completion is, mathematically, the gold answer: GSM8K, MATH and their like."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from typing import Any

from hybrid_grpo.rewards.maths.grading import is_mathematical, same_answer
from hybrid_grpo.rewards.maths.notation import LONGEST
from hybrid_grpo.rewards.rules import Completions, completion_texts


def math_answer(completions: Completions, answer: list[Any], *, boxed_only: bool = False) -> list[float | None]:
    r"""1.0 where the final answer that a completion states is mathematically the column `answer`, else 0.0.

    **Where it is stated.** After the last `</think>`, if there is one: in the last `\boxed{}`, or after a later
    `####` (unless words stand there: a heading). Boxes that only `,`, `and`, `or` or `x =` separate are one list. Where
    nothing is marked: in the last `<answer>` tag, else behind the last "answer is" or "Answer:", else in the words
    after `####`. With `boxed_only` nothing but a box counts. A last box that is not closed states nothing, nor does a
    number that merely occurs.

    **What it must be.** The gold answer is bare, or a worked solution that ends in `####` or holds `\boxed{}`. Values
    are compared, not their notation (2/4 is 0.5), and exactly: 0.333 is not 1/3 and 3.14 is not \pi, since where
    rounding is asked for the gold answer is round. Conventions:

    - 1,000 is a thousand and 1.000 is one; (1,000) is a point.
    - A percent or degree sign is read both as a unit that may be left out (MATH's own grader drops it, and gold
      answers have it or not) and as what it means: 12% is 12, and is 0.12; 180° is 180, and is \pi.
    - A unit may be left out or added; two units that are known must be of one dimension and are converted (5 m is
      500 cm, not 5 cm). Nouns ("eggs") are no units. `$` is dollars.
    - A base may be left out, and may not differ: 2516_8 is 2516 in an answer to "in base 8".
    - A list and a set are unordered, (a, b) is ordered and its brackets count: (1, 2) is neither [1, 2] nor {1, 2} nor
      "1, 2". x < 2 is (-\infty, 2); x = 1, y = 2 is (1, 2); a ± b is a list of two. All of a list must be right:
      "3 or 4" is not 3.
    - `x = 5` is 5, `m + n = 5` is 5; `y = 5` is not `x = 5`, `x + 2 = 5` is not 5; in a chain a = b = c all must be
      equal. Equations are the same if one is a multiple of the other.
    - Expressions are the same if they have the same values, \sqrt{x^2} not being x. Mixed numbers: 1\frac{1}{2} is 3/2.
    - Words are compared in any case, letters with their case; (A) is A, and is "A) 42".

    Set differences, and sums, integrals and limits where the gold answer has them, are compared by math-verify,
    everything else here. None where `answer` is None.

    Raises:
        ValueError: math-verify is not installed, or an answer of the data set is empty.
    """
    _require_math_verify()
    golds = [None if gold is None else gold_answer(gold) for gold in answer]
    return [
        None if gold is None else float(_is_right(text, gold, boxed_only))
        for text, gold in zip(completion_texts(completions), golds, strict=True)
    ]


def gold_answer(gold: Any) -> str:
    """The answer itself, where the data set has a worked solution.

    Raises:
        ValueError: there is none.
    """
    text = str(gold).strip()
    stated = next((found for find in (_marked, _headed) if (found := find(text)) is not None), text).strip()
    if not stated:
        raise ValueError(f"answer {gold!r} of the data set is empty")
    return stated


def stated_answer(text: str, boxed_only: bool = False) -> str | None:
    """The text of the final answer that a completion states, or None. math_answer says where that is."""
    text = text.rpartition("</think>")[2]
    finders = (_boxed,) if boxed_only else (_marked, _tagged, _phrased, _headed)
    return next((found for find in finders if (found := find(text)) is not None), None)


_BOX = re.compile(r"\\f?box(?:ed)?\s*(?:\{|(?<=boxed)\s+(?=[^\s{]))")
_BRACE = re.compile(r"\\[{}\\]|[{}]")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_TAG = re.compile(r"<answer>([^<]{0,2000})</answer>")
_PHRASE = re.compile(
    r"\banswers?\b[*_]*(?:\s(?:to|for|of)\b[^.\n:]{0,80}?)?(?:\s(?:is|are|was)\b[*_]*\s?[:=]?|\s?[:=])[*_\s]*"
    r"(?:(?:\$\$|\\\[)\s*)?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\.(?=\s|$|[*_$])|\n|,?\s(?:because|since|as|which|where|so|I hope)\b")
_JOINT = re.compile(r"and|or|,|;")
_JOINED = re.compile(r"[\s$,;()\\]*(?:and|or)?[\s$()\\]*(?:[A-Za-z](?:_\w)?\s*=\s*)?[\s$]*")
_LONGEST_JOINT, _MOST_JOINED, _MOST_HEADINGS = 40, 20, 20


def _is_right(text: str, gold: str, boxed_only: bool) -> bool:
    stated = stated_answer(text, boxed_only)
    return stated is not None and len(stated) <= 4 * LONGEST and same_answer(stated, gold)


def _marked(text: str) -> str | None:
    """In a box, or after a `####` that stands behind all boxes and is no heading of words."""
    end = max((box.end() for box in _BOX.finditer(text)), default=0)
    lines = _after_hashes(text[end:])[-_MOST_HEADINGS:]
    return next((line for line in reversed(lines) if is_mathematical(line)), None) or _boxed(text)


def _headed(text: str) -> str | None:
    """After the last `####`, words or not."""
    lines = _after_hashes(text)
    return lines[-1] if lines else None


def _after_hashes(text: str) -> list[str]:
    return [line for match in _HASHES.finditer(text) if (line := match[1].strip())]


def _boxed(text: str) -> str | None:
    """In the last box, and those that are joined to it; empty where one is not closed or far too many are, None
    where there is none.
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
        if not 0 < len(between) <= _LONGEST_JOINT or not _JOINED.fullmatch(between) or not _JOINT.search(between):
            break
        contents, begin = [content, *contents], box.start()
    return "" if "" in contents else ", ".join(contents)


def _content(text: str, box: re.Match[str]) -> tuple[str, int]:
    """What is in the box, and where it ends; empty where it is not closed, or holds far too much."""
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
    tagged = _TAG.findall(text)
    return tagged[-1] if tagged else None


def _phrased(text: str) -> str | None:
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() : matches[-1].end() + LONGEST]
    end = _SENTENCE_END.search(rest)
    return rest[: end.start()] if end else rest


@cache
def _require_math_verify() -> None:
    if find_spec("math_verify") is None:
        raise ValueError("math_answer needs math-verify: pip install 'hybrid_grpo[math]'")
