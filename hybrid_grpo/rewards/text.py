r"""Rules on the text of a completion: its form, its language, its length, and multiple choice.

All are linear in the length of the text: every repetition in a pattern is bounded, and none is nested.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import string
import unicodedata
from collections.abc import Sequence
from typing import Any

from hybrid_grpo.rewards.builtin import BUILTINS
from hybrid_grpo.rewards.rules import Completions, completion_texts


def format_tags(
    completions: Completions,
    *,
    tags: Sequence[str] = ("think", "answer"),
    strict: bool = True,
    partial: bool = False,
    opened: bool = False,
) -> list[float | None]:
    """1.0 where the completion is `<think>...</think><answer>...</answer>`, else 0.0.

    Every one of the `tags` opens and closes exactly once, one after the other, in their order (the format of
    DeepSeek-R1, arXiv:2501.12948, section 2.2.2). What stands between is not looked at, and may be nothing.

    Args:
        strict: outside of the tags there is white space only.
        partial: a completion that fails has half of the share of marks (`<think>`, `</think>`, ...) that it holds
            exactly once, so at most 0.5, in place of 0.0.
        opened: the chat template has written the first opening tag already, as those of reasoning models do.

    Raises:
        ValueError: `tags` is empty, or holds a name twice or one that is not of letters, digits, `_` and `-`.
    """
    if isinstance(tags, str) or not tags or len(set(tags)) < len(tags):
        raise ValueError(f"tags {tags!r} must be a list of different names, as in [think, answer]")
    for tag in tags:
        if not isinstance(tag, str) or not re.fullmatch(r"[\w-]+", tag):
            raise ValueError(f"tags {tag!r} must be a name, without the angle brackets")
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    prefix = marks[0] if opened else ""
    return [_format(prefix + text, marks, strict, partial) for text in completion_texts(completions)]


def _format(text: str, marks: list[str], strict: bool, partial: bool) -> float:
    once = [text.count(mark) == 1 for mark in marks]
    places = [text.find(mark) for mark in marks]
    if all(once) and places == sorted(places):
        # Before the first mark, between the tags, after the last.
        ends = [0, *(place + len(mark) for place, mark in zip(places[1::2], marks[1::2], strict=True))]
        outside = (text[end:start] for end, start in zip(ends, [*places[::2], len(text)], strict=True))
        if not strict or not any(part.strip() for part in outside):
            return 1.0
    return 0.5 * sum(once) / len(once) if partial else 0.0


_LETTERS = string.ascii_uppercase

# A letter that stands alone, or any in brackets. `A` and `I` before a word are words themselves, unless a reason
# follows; "B or C" chooses nothing.
_LETTER = (
    r"[\s*_`$\"'(\[{\\]{0,8}(?:(?:text|textbf|mathrm|mathbf)\s?\{\s?\(?)?"
    r"(?:(?<=[(\[{])(?P<bracketed>[A-Za-z])(?=\s?\\?[)\]}.:])|(?P<tagged>[a-z])(?=\s?</answer>)"
    r"|(?P<bare>[A-Z])(?![\w'\u2019^+-])"
    r"(?!(?<=[AI])\s{1,4}(?!because|since|as\b|for\b|and\b|which|with\b|is\b)[a-z]))"
    r"(?!['\"*_`)\]}]{0,4}\s{0,4}(?:\b(?:or|and)\b|[/&])[\s*(]{0,4}[A-Z](?![\w'\u2019]))"
)
# Words between "answer" and "is" may not deny it; those after it may only stress it.
_ANSWER = (
    r"\b(?:answer|choice|option)\b(?:(?:(?!\b(?:not|never|cannot)\b|n['\u2019]t)[^.:;!?\n]){0,60}?\b(?:is|be)\b"
    r"|[\s*_`)]{0,6}[-:=\u2013])[\s*_`:]{0,6}(?:(?:thus|therefore|clearly|indeed|most likely|probably)\s)?"
    r"(?:(?:the )?(?:option|choice|letter)\b)?"
)
_CHOSEN = (
    re.compile(
        rf"(?:(?i:{_ANSWER}|\\boxed\s?(?=\{{)|<answer>)){_LETTER}"
        # Said the other way round.
        r"|(?<![\w'\u2019(])\(?(?P<right>[A-Z])\)?[*_`]{0,3}\s"
        r"(?i:is (?:the )?(?:(?:correct|right|best) (?:answer|choice|option)|correct|right)\b)"
    ),
    re.compile(r"\*\*\(?(?P<bold>[A-Z])(?:\)?[.:]?\*\*|[).:]{1,2}\s[^*\n]{1,200}\*\*)"),
    re.compile(r"^[ \t]{0,8}[(\[]?(?P<line>[A-Z])[)\].:]{0,2}[ \t]{0,8}$", re.MULTILINE),
)
"""Ways to choose, the plainest first."""
_ITEM = re.compile(r"^[ \t]{0,8}\(?([A-Z])[).:]{1,2}[ \t]", re.MULTILINE)


def multiple_choice(
    completions: Completions, answer: list[Any], choices: list[Any] | None = None
) -> list[float | None]:
    r"""1.0 where the completion chooses the letter of the column `answer`, else 0.0.

    A completion chooses by `The answer is (B)`, `Answer: B`, `\boxed{B}`, `<answer>B</answer>` or `B is correct`; where
    it has none of these, by `**B**`; else by a line with nothing but `B.`, or a single line that begins with `B. `. Of
    several the last counts. With the column `choices`, its letters are those of the choices, and a completion that is
    the text of one chooses it. `B or C` chooses nothing.

    Args:
        answer: a letter, the index of a choice from 0, or else its text (which needs `choices`); None: does not apply.
        choices: the texts of the choices of every row.

    Raises:
        ValueError: an answer is none of these.
    """
    texts = completion_texts(completions)
    rows = [None] * len(texts) if choices is None else choices
    golds = [None if gold is None else choice_letter(gold, row) for gold, row in zip(answer, rows, strict=True)]
    return [
        None if gold is None else float(chosen_letter(text, row) == gold)
        for text, gold, row in zip(texts, golds, rows, strict=True)
    ]


def choice_letter(answer: Any, choices: Sequence[Any] | None = None) -> str:
    """The letter of a choice that is given by its letter, its index from 0, or its text.

    Raises:
        ValueError: it is none of these.
    """
    letters = _LETTERS if choices is None else _LETTERS[: len(choices)]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        return letters[answer]
    if isinstance(answer, str):
        said = answer.strip()
        if len(said) == 1 and said.upper() in letters:
            return said.upper()
        texts = [str(choice).strip() for choice in choices or ()]
        if said in texts:
            return letters[texts.index(said)]
    what = f"the {len(choices)} choices" if choices is not None else "26 (its text needs a column choices)"
    raise ValueError(f"answer {answer!r} is not the letter, the index from 0 or the text of one of {what}")


def chosen_letter(text: str, choices: Sequence[Any] | None = None) -> str | None:
    """The letter of the choice that `text` ends up with, or None; see `multiple_choice`."""
    letters = _LETTERS if choices is None else _LETTERS[: len(choices)]
    for pattern in _CHOSEN:
        found = [match[match.lastgroup or 0].upper() for match in pattern.finditer(text)]
        if known := [letter for letter in found if letter in letters]:
            return known[-1]
    if len(items := {letter for letter in _ITEM.findall(text) if letter in letters}) == 1:
        return items.pop()
    plain = [str(choice).strip().casefold() for choice in choices or ()]
    said = text.strip().rstrip(".").casefold()
    return letters[plain.index(said)] if plain.count(said) == 1 else None


_SCRIPTS = {
    "latin", "greek", "cyrillic", "armenian", "hebrew", "arabic", "devanagari", "bengali", "gurmukhi", "gujarati",
    "oriya", "tamil", "telugu", "kannada", "malayalam", "sinhala", "thai", "lao", "tibetan", "myanmar", "georgian",
    "hangul", "ethiopic", "khmer", "mongolian", "bopomofo", "han", "hiragana", "katakana",
}  # fmt: skip
_NAMED = {"CJK": "han", "IDEOGRAPHIC": "han", "KANGXI": "han"}
"""Scripts whose characters are called otherwise in Unicode."""
_OF_NO_SCRIPT = {
    "MODIFIER", "MATHEMATICAL", "DOUBLE", "SCRIPT", "BLACK", "SUPERSCRIPT", "SUBSCRIPT", "MICRO", "OHM", "KELVIN",
    "ANGSTROM", "FEMININE", "MASCULINE", "ALEF", "BET", "GIMEL", "DALET", "TURNED", "PLANCK", "INFORMATION",
}  # fmt: skip
"""First words of the names of letters that stand in texts of any script: symbols of mathematics and the like."""


def language_penalty(completions: Completions, *, scripts: Sequence[str] = ("latin",)) -> list[float | None]:
    """Minus the share of letters that are of none of the `scripts`: 0.0 where all belong, -1.0 where none does.

    A guard against reasoning that drifts into another language (the language consistency of DeepSeek-R1,
    arXiv:2501.12948, section 2.3.2, by words there). Scripts are not languages: French for English goes unseen, and
    an alpha in an English proof is Greek (allow `greek`). Digits, marks and symbols of mathematics are no letters here;
    a completion without letters has 0.0.

    Args:
        scripts: lower-case names of Unicode scripts, as in [han, hiragana, katakana] for Japanese.

    Raises:
        ValueError: `scripts` is empty or names one that is not known.
    """
    if isinstance(scripts, str) or not scripts:
        raise ValueError(f"scripts {scripts!r} must be a list of names, as in [latin]")
    for script in scripts:
        if script not in _SCRIPTS:
            raise ValueError(f"scripts: there is no {script}: known are {', '.join(sorted(_SCRIPTS))}")
    wanted = frozenset(scripts)
    penalties: list[float | None] = []
    for text in completion_texts(completions):
        found = [script for script in map(_script, text) if script is not None]
        penalties.append(sum(script in wanted for script in found) / len(found) - 1 if found else 0.0)
    return penalties


@functools.cache
def _script(character: str) -> str | None:
    """The script of a letter, `other` for one that is not in the table; None for what is no letter of a script."""
    if not unicodedata.category(character).startswith("L"):
        return None
    words = re.split("[ -]", unicodedata.name(character, "UNKNOWN"))
    word = words[1] if words[0] in ("FULLWIDTH", "HALFWIDTH") else words[0]
    script = _NAMED.get(word, word.lower())
    return script if script in _SCRIPTS else None if word in _OF_NO_SCRIPT else "other"


def word_repetition_penalty(completions: Completions, *, ngram: int = 3) -> list[float | None]:
    """Minus the share of a completion's runs of `ngram` words that repeat an earlier one; 0.0 where none does.

    Yeo et al., arXiv:2502.03373. As `repetition_penalty`, but in words between white space, in lower case,
    so that it does not depend on the tokenizer. Text without white space, as in Chinese, is one word: count tokens.

    Raises:
        ValueError: `ngram` is below 1.
    """
    if ngram < 1:
        raise ValueError(f"ngram {ngram} must be 1 or greater")
    penalties: list[float | None] = []
    for text in completion_texts(completions):
        words = text.lower().split()
        runs = list(zip(*(words[start:] for start in range(ngram)), strict=False))
        penalties.append(len(set(runs)) / len(runs) - 1 if runs else 0.0)
    return penalties


def length_target(completion_ids: list[list[int]], *, target: int, tolerance: int = 0) -> list[float | None]:
    """0.0 within `tolerance` tokens of `target`, falling linearly to -1.0 at `target` tokens beyond that.

    The distance from a wanted length of L1 (Aggarwal and Welleck, arXiv:2503.04697, equation 1), as a share of it.

    Raises:
        ValueError: `target` is below 1 or `tolerance` below 0.
    """
    if target < 1 or tolerance < 0:
        raise ValueError(f"target {target} must be 1 or greater, and tolerance {tolerance} 0 or greater")
    return [0.0 - min(1.0, max(0, abs(len(ids) - target) - tolerance) / target) for ids in completion_ids]


_JUDGES = ("exact_match", "numeric_answer", "math_answer", "multiple_choice")
"""Built-ins that say right or wrong from the column `answer`."""


def cosine_length(
    completions: Completions,
    completion_ids: list[list[int]],
    answer: list[Any],
    *,
    max_length: int,
    judge: str = "math_answer",
    right: Sequence[float] = (1.0, 0.5),
    wrong: Sequence[float] = (-1.0, -0.5),
    exceeded: float | None = None,
) -> list[float | None]:
    """Right or wrong, with a length: short is best among the right, long among the wrong.

    The cosine reward of Yeo et al., arXiv:2502.03373: over L tokens of at most `max_length` it goes from
    the first to the second of two values a, b as b + (a - b) (1 + cos(pi L / max_length)) / 2. It takes the place of
    the reward that it judges by, which is not to be configured beside it; for the outcome of the evaluation a right
    completion has at least the smaller of `right` (eval.threshold).

    Args:
        judge: the built-in that says right (1.0) or wrong from `answer`: exact_match, numeric_answer, math_answer or
            multiple_choice; where it does not apply, neither does this.
        right: value at 0 tokens and at `max_length`; the paper has 2 and 1.
        wrong: the same for wrong completions; the paper has -10 and 0.
        exceeded: value of completions of `max_length` tokens and more, right or wrong (-10 in the paper); not given:
            they have the second value.

    Raises:
        ValueError: `max_length` is below 1, `judge` is none of these, or `right` or `wrong` is not two numbers.
    """
    if max_length < 1:
        raise ValueError(f"max_length {max_length} must be 1 or greater")
    if judge not in _JUDGES:
        raise ValueError(f"judge {judge!r} must be one of {', '.join(_JUDGES)}")
    for name, pair in (("right", right), ("wrong", wrong)):
        if len(pair) != 2 or not all(isinstance(value, int | float) for value in pair):
            raise ValueError(f"{name} {pair!r} must be two numbers, for 0 and for max_length tokens")
    place, _, name = BUILTINS[judge].place.rpartition(":")
    verdicts = getattr(importlib.import_module(place), name)(completions, answer)
    rewards: list[float | None] = []
    for verdict, ids in zip(verdicts, completion_ids, strict=True):
        if verdict is None:
            rewards.append(None)
        elif exceeded is not None and len(ids) >= max_length:
            rewards.append(exceeded)
        else:
            short, long = right if verdict >= 1.0 else wrong
            progress = min(len(ids) / max_length, 1.0)
            rewards.append(long + (short - long) * (1 + math.cos(math.pi * progress)) / 2)
    return rewards
