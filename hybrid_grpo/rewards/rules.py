"""Built-in reward functions for exact answers, format and repetition.

They are called like a user's own functions (see functions.py): inputs and columns of the data set are passed by name,
and each row gets a number, or None if the function does not apply. In a signature, columns come first. Settings
(`kwargs` of the configuration) are keyword-only; an invalid one raises ValueError before any row is scored.
"""

import math
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise, zip_longest
from typing import Any, TypeVar

PromptText = str | list[dict[str, Any]]
"""Text or chat messages."""
Completions = list[str] | list[list[dict[str, Any]]]
"""[B], the completions: texts or, for chat prompts, lists of messages."""
LogExtra = Callable[[str, list[Any]], None]
"""Stores a list with one element per completion under a name. Majority votes in evaluations use the name `answer`."""

T = TypeVar("T")
_DIGITS = re.compile(r"[-+]?(?:[0-9]{1,100}(?:\.[0-9]{0,100})?|\.[0-9]{1,100})")


def completion_texts(completions: Completions) -> list[str]:
    """The text of every completion; for chats, the text of the last message."""
    return [c if isinstance(c, str) else str(c[-1]["content"]) for c in completions]


def gold_answers(answer: Any, read: Callable[[Any], T]) -> list[T] | None:
    """Return the right answers of a row, each read by `read`: those of a list, any of which is right, or the only one;
    None if there is none. Raises ValueError as `read` does, and for an empty list."""
    if isinstance(answer, list | tuple) and not answer:
        raise ValueError("answer [] of the data set lists no right answer: give one, or null where there is none")
    return None if answer is None else list(map(read, answer if isinstance(answer, list | tuple) else [answer]))


def compared(
    stated: Sequence[T | None], references: Sequence[Sequence[T] | None], log_extra: LogExtra | None = None,
    same: Callable[[T, T], bool] = operator.eq,
) -> list[float | None]:  # fmt: skip
    """Return for each row 1.0 if the stated answer equals one of the references, else 0.0; None if there are none."""
    if log_extra is not None:
        log_extra("answer", [None if answer is None else str(answer) for answer in stated])
    return [
        None if right is None else float(answer is not None and any(same(answer, one) for one in right))
        for answer, right in zip(stated, references, strict=True)
    ]


def exact_match(completions: Completions, answer: list[Any]) -> list[float | None]:
    """1.0 if the completion equals the column `answer`, both stripped of outer white space, else 0.0. A number equals
    the same number in other digits: 42.0 is 42. Any answer of a list is right. None if `answer` is None. Raises
    ValueError for other values."""
    texts = [text.strip() for text in completion_texts(completions)]
    return compared(texts, [gold_answers(gold, _text_or_number) for gold in answer], same=_equal)


def _text_or_number(gold: Any) -> Any:
    if isinstance(gold, str):
        return gold.strip()
    if isinstance(gold, bool) or not isinstance(gold, int | float) or not math.isfinite(gold):
        raise ValueError(f"answer {gold!r:.40} of the data set is neither text nor a number: write it as text")
    return Fraction(str(gold))


def _equal(text: Any, gold: Any) -> bool:
    if isinstance(gold, Fraction):
        return _DIGITS.fullmatch(text) is not None and Fraction(text) == gold
    return bool(text == gold)


def letters_in_place(
    completions: Completions, answer: list[Any], *, steps: bool = False
) -> list[float | list[tuple[str, float]] | None]:
    """Share of positions at which the completion and the column `answer`, both stripped, have the same character. The
    positions are those of the longer text, so longer completions gain nothing. Of a list, the answer with the highest
    share counts. None if `answer` is None. Raises ValueError for an answer that is neither text nor a number. With
    `steps`, every character is a step whose reward is the change that it makes to the share; the sum is the same."""
    rewards: list[float | list[tuple[str, float]] | None] = []
    for text, gold in zip(completion_texts(completions), answer, strict=True):
        letters = text.strip()
        options = [_shares(letters, one) for one in gold_answers(gold, _letters) or ()]
        shares = max(options, key=lambda shares: shares[-1], default=None)
        if shares is None or not letters or not steps:
            rewards.append(None if shares is None else shares[-1])
        else:
            space = text[: len(text) - len(text.lstrip())]
            changes = [after - before for before, after in pairwise(shares)]
            rewards.append([(space, 0.0)] * bool(space) + list(zip(letters, changes, strict=True)))
    return rewards


def _letters(gold: Any) -> str:
    _text_or_number(gold)
    return str(gold).strip()


def _shares(letters: str, gold: str) -> list[float]:
    """Return the share of letters in place before each letter, and after the last."""
    if not letters:
        return [float(not gold)]
    right = accumulate(a == b for a, b in zip_longest(letters, gold[: len(letters)]))
    return [0.0, *(count / max(written, len(gold)) for written, count in enumerate(right, 1))]


def format_regex(completions: Completions, *, pattern: str) -> list[float | None]:
    r"""1.0 if `pattern` matches the whole completion (re.fullmatch), else 0.0; `.` also matches a newline. An example
    is `<think>.*?</think>\s*<answer>.*?</answer>`. Nested repetition, such as `(a+)+`, can take time exponential in the
    length of a completion."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    return [float(compiled.fullmatch(text) is not None) for text in completion_texts(completions)]


def format_tags(
    completions: Completions, *, tags: Sequence[str] = ("think", "answer"), strict: bool = True, partial: bool = False,
    opened: bool = False,
) -> list[float | None]:  # fmt: skip
    """1.0 if the completion is `<think>...</think><answer>...</answer>`, else 0.0.

    Each of the `tags` must open and close exactly once, in the given order (the format of DeepSeek-R1,
    arXiv:2501.12948, section 2.2.2), and if `strict` nothing but white space may be outside of them. If `partial`, a
    completion that fails earns half the share of the marks (`<think>`, `</think>`, ...) that it contains exactly once.
    With `opened`, the chat template has already written the first one, as for reasoning models.
    """
    if isinstance(tags, str) or not tags or len(set(tags)) < len(tags):
        raise ValueError(f"tags {tags!r} must be a list of different names, as in [think, answer]")
    for tag in tags:
        if not isinstance(tag, str) or not re.fullmatch(r"[\w-]+", tag):
            raise ValueError(f"tags {tag!r} must be a name, without the angle brackets")
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    inside = rf"(?:(?!{'|'.join(marks)}).)*"
    outside = r"\s*" if strict else inside
    pattern = outside + "".join(f"<{tag}>{inside}</{tag}>{outside}" for tag in tags)
    texts = [marks[0] * opened + text for text in completion_texts(completions)]
    rewards = format_regex(texts, pattern=pattern)
    if not partial:
        return rewards
    return [
        reward or 0.5 * sum(text.count(mark) == 1 for mark in marks) / len(marks)
        for text, reward in zip(texts, rewards, strict=True)
    ]


def repeated_share(items: Iterable[Hashable], ngram: int) -> float:
    """Return the share of n-grams that repeat an earlier n-gram; 0.0 if the items are too few for an n-gram."""
    items = list(items)
    runs = list(zip(*(items[start:] for start in range(ngram)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def repetition_penalty(completion_ids: list[list[int]], *, ngram: int = 3) -> list[float | None]:
    """Minus the share of n-grams (`ngram` tokens) that repeat an earlier one: near -1.0 in a loop, 0.0 if none do."""
    if ngram < 1:
        raise ValueError(f"ngram {ngram} must be 1 or greater")
    return [0.0 - repeated_share(ids, ngram) for ids in completion_ids]
