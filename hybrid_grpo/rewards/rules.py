"""Simple rules on text and tokens, and what they share with the other built-in reward functions.

Each follows the convention of scoring.py, as a user's own would: inputs and data set columns by name, one number
(or None: does not apply) per row. Columns come first in a signature; settings, given as `kwargs` of the
configuration, are keyword-only and are checked before any row is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from hybrid_grpo.rewards.maths.numeric import parse_number, stated_number

Completions = list[str] | list[list[dict[str, Any]]]
"""[B], text; or, for chat prompts, a list with the assistant's message."""


def exact_match(completions: Completions, answer: list[Any]) -> list[float | None]:
    """1.0 where the completion is the column `answer`, both stripped of outer white space, else 0.0.

    None where `answer` is None. Answers that are not text are compared as `str` shows them.
    """
    return [
        None if gold is None else float(text.strip() == str(gold).strip())
        for text, gold in zip(completion_texts(completions), answer, strict=True)
    ]


def numeric_answer(completions: Completions, answer: list[Any], *, last_number: bool = False) -> list[float | None]:
    r"""1.0 where the number that the completion states as its answer equals the column `answer`, else 0.0.

    The completion states it after `####` (GSM8K, arXiv:2110.14168) or in `\boxed{}`; the last such number counts.
    With `last_number`, a completion that marks none is read for its last number. numeric.py says which
    notations are understood; the comparison is exact.

    `answer` is a number, the text of one, or a worked solution that itself ends in `####` or `\boxed{}`.
    None where it is None.

    Raises:
        ValueError: an answer of the data set is not a number.
    """
    golds = [None if gold is None else _gold_number(gold) for gold in answer]
    return [
        None if gold is None else float(stated_number(text, last_number) == gold)
        for text, gold in zip(completion_texts(completions), golds, strict=True)
    ]


def format_regex(completions: Completions, *, pattern: str) -> list[float | None]:
    r"""1.0 where `pattern` matches the whole completion (re.fullmatch), else 0.0; `.` also matches a line end.

    As in `<think>.*?</think>\s*<answer>.*?</answer>`. A pattern with nested repetition, as in `(a+)+`, can take
    time exponential in the length of a completion.

    Raises:
        ValueError: `pattern` is not a regular expression.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    return [float(compiled.fullmatch(text) is not None) for text in completion_texts(completions)]


def length_penalty(completion_ids: list[list[int]], *, max_length: int, buffer: int) -> list[float | None]:
    """0.0 up to `max_length - buffer` tokens, falling linearly to -1.0 at `max_length`, and -1.0 beyond.

    The soft overlong punishment of DAPO, arXiv:2503.14476, equation 13: L_max is `max_length`, L_cache is `buffer`.

    Raises:
        ValueError: not 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer {buffer} must be above 0 and at most max_length {max_length}")
    return list(overlong_penalty([len(ids) for ids in completion_ids], max_length, buffer, 1.0))


def repetition_penalty(completion_ids: list[list[int]], *, ngram: int = 3) -> list[float | None]:
    """Minus the share of a completion's n-grams that repeat an earlier one: 0.0 where none does, near -1.0 in a loop.

    The n-grams are runs of `ngram` tokens; a completion that is shorter repeats nothing (Yeo et al., arXiv:2502.03373,
    count words).

    Raises:
        ValueError: `ngram` is below 1.
    """
    if ngram < 1:
        raise ValueError(f"ngram {ngram} must be 1 or greater")
    return [_repeated_share(ids, ngram) for ids in completion_ids]


def letters_in_place(
    completions: Completions, answer: list[Any], *, steps: bool = False
) -> list[float | list[tuple[str, float]] | None]:
    """Share of positions at which completion and column `answer`, both stripped, have the same character.

    In [0, 1]. Positions are those of the longer of the two, so that writing on never gains. None where `answer`
    is None.

    Args:
        steps: every character is a step, and its reward what it changes of the share: the sum is the same.
    """
    judge = _changes_in_place if steps else _share_in_place
    return [
        None if gold is None else judge(text, str(gold).strip())
        for text, gold in zip(completion_texts(completions), answer, strict=True)
    ]


def overlong_penalty(lengths: Sequence[int], max_completion_tokens: int, buffer: int, factor: float) -> list[float]:
    """What is added to the reward of long completions: DAPO, arXiv:2503.14476, eq. 13, times `factor`.

    0 up to max_completion_tokens - buffer tokens, falling linearly to -factor at max_completion_tokens, and -factor
    beyond. 0 for all with buffer 0.
    """
    if not buffer:
        return [0.0] * len(lengths)
    return [factor * min(0.0, max(-1.0, (max_completion_tokens - buffer - length) / buffer)) for length in lengths]


def completion_texts(completions: Completions) -> list[str]:
    """The text of every completion; of chats that of the last message."""
    return [c if isinstance(c, str) else str(c[-1]["content"]) for c in completions]


def _gold_number(gold: Any) -> Fraction:
    if isinstance(gold, str):
        number = parse_number(gold)
        number = stated_number(gold) if number is None else number
        if number is None:
            raise ValueError(f"answer {gold!r} is not a number, and states none after #### or in \\boxed{{}}")
        return number
    # str gives the shortest decimal of a float: 0.1 in the data is the number 0.1, not its binary neighbour.
    return Fraction(str(gold))


def _repeated_share(ids: list[int], ngram: int) -> float:
    count = len(ids) - ngram + 1
    return len({tuple(ids[i : i + ngram]) for i in range(count)}) / count - 1 if count > 0 else 0.0


def _share_in_place(text: str, gold: str) -> float:
    letters = text.strip()
    longest = max(len(letters), len(gold))
    same = sum(a == b for a, b in zip(letters, gold, strict=False))
    return same / longest if longest else 1.0


def _changes_in_place(text: str, gold: str) -> list[tuple[str, float]] | float:
    """The characters of the text, space before the first as one, and what each of them adds to the share."""
    letters = text.strip()
    if not letters:
        return _share_in_place(text, gold)
    right = [0, *accumulate(a == b for a, b in zip_longest(letters, gold[: len(letters)]))]
    shares = [count / max(written, len(gold)) if written else 0.0 for written, count in enumerate(right)]
    changes = [(letter, after - before) for letter, (before, after) in zip(letters, pairwise(shares), strict=True)]
    space = text[: len(text) - len(text.lstrip())]
    return [(space, 0.0), *changes] if space else changes
