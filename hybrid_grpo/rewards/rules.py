"""Built-in reward functions for exact answers, format and repetition.

They are called like a user's own functions (see functions.py): inputs and columns of the data set are passed by name,
and each row gets a number, or None if the function does not apply. In a signature, columns come first. Settings
(`kwargs` of the configuration) are keyword-only; an invalid one raises ValueError before any row is scored.
"""

import operator
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Any, TypeVar

PromptText = str | list[dict[str, Any]]
"""Text or chat messages."""
Completions = list[str] | list[list[dict[str, Any]]]
"""[B], the completions: texts or, for chat prompts, lists of messages."""
LogExtra = Callable[[str, list[Any]], None]
"""Stores a list with one element per completion under a name. Majority votes in evaluations use the name `answer`."""

T = TypeVar("T")


def completion_texts(completions: Completions) -> list[str]:
    """The text of every completion; for chats, the text of the last message."""
    return [c if isinstance(c, str) else str(c[-1]["content"]) for c in completions]


def compared(
    stated: Sequence[T | None],
    references: Sequence[T | None],
    log_extra: LogExtra | None = None,
    same: Callable[[T, T], bool] = operator.eq,
) -> list[float | None]:
    """Return for each row 1.0 if the stated answer equals the reference, else 0.0; None if there is no reference."""
    if log_extra is not None:
        log_extra("answer", [None if answer is None else str(answer) for answer in stated])
    return [
        None if reference is None else float(answer is not None and same(answer, reference))
        for answer, reference in zip(stated, references, strict=True)
    ]


def exact_match(completions: Completions, answer: list[Any]) -> list[float | None]:
    """1.0 if the completion equals the column `answer`, both stripped of outer white space, else 0.0.

    None if `answer` is None. An answer that is not text is converted by `str`.
    """
    texts = [text.strip() for text in completion_texts(completions)]
    return compared(texts, [None if gold is None else str(gold).strip() for gold in answer])


def letters_in_place(
    completions: Completions, answer: list[Any], *, steps: bool = False
) -> list[float | list[tuple[str, float]] | None]:
    """Share of positions at which the completion and the column `answer`, both stripped, have the same character.

    The positions are those of the longer text, so longer completions gain nothing. None if `answer` is None.
    With `steps`, every character is a step whose reward is the change that it makes to the share; the sum is the same.
    """
    rewards: list[float | list[tuple[str, float]] | None] = []
    for text, gold in zip(completion_texts(completions), answer, strict=True):
        letters, answer_letters = text.strip(), str(gold).strip()
        right = accumulate(a == b for a, b in zip_longest(letters, answer_letters[: len(letters)]))
        shares = [count / max(written, len(answer_letters)) for written, count in enumerate(right, 1)]
        if gold is None:
            rewards.append(None)
        elif not letters or not steps:
            rewards.append(shares[-1] if shares else float(not answer_letters))
        else:
            space = text[: len(text) - len(text.lstrip())]
            changes = [after - before for before, after in pairwise([0.0, *shares])]
            rewards.append([(space, 0.0)] * bool(space) + list(zip(letters, changes, strict=True)))
    return rewards


def format_regex(completions: Completions, *, pattern: str) -> list[float | None]:
    r"""1.0 if `pattern` matches the whole completion (re.fullmatch), else 0.0; `.` also matches a newline.

    An example is `<think>.*?</think>\s*<answer>.*?</answer>`. Nested repetition, such as `(a+)+`, can take time
    exponential in the length of a completion.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}") from error
    return [float(compiled.fullmatch(text) is not None) for text in completion_texts(completions)]


def format_tags(
    completions: Completions,
    *,
    tags: Sequence[str] = ("think", "answer"),
    strict: bool = True,
    partial: bool = False,
    opened: bool = False,
) -> list[float | None]:
    """1.0 if the completion is `<think>...</think><answer>...</answer>`, else 0.0.

    Each of the `tags` must open and close exactly once, in the given order (the format of DeepSeek-R1,
    arXiv:2501.12948, section 2.2.2). Any text, or none, may stand between an opening tag and its closing tag.

    Args:
        strict: allow nothing but white space outside of the tags.
        partial: a completion that fails earns, instead of 0.0, half the share of the marks (`<think>`, `</think>`, ...)
            that it contains exactly once; the maximum is 0.5.
        opened: the chat template has already written the first opening tag, as for reasoning models.
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
