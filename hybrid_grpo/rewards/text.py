r"""Built-in reward functions for multiple choice and for the language of a completion.

Patterns take time linear in the length of the text: every repetition is bounded, and none is nested.
"""

import re
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import regex  # type: ignore[import-untyped]

from hybrid_grpo.rewards.rules import Completions, LogExtra, compared, completion_texts, gold_answers

_LETTERS = string.ascii_uppercase

# A single capital letter, or any letter in brackets. `A` and `I` before a word are words themselves, unless that word
# begins a reason; "B or C" chooses nothing.
_LETTER = (
    r"[\s*_`$\"'(\[{\\]{0,8}(?:(?:text|textbf|mathrm|mathbf)\s?\{\s?\(?)?"
    r"(?:(?<=[(\[{])(?P<bracketed>[A-Za-z])(?=\s?\\?[)\]}.:])|(?P<tagged>[a-z])(?=\s?</answer>)"
    r"|(?P<bare>[A-Z])(?![\w'\u2019^+-])"
    r"(?!(?<=[AI])\s{1,4}(?!because|since|as\b|for\b|and\b|which|with\b|is\b)[a-z]))"
    r"(?!['\"*_`)\]}]{0,4}\s{0,4}(?:\b(?:or|and)\b|[/&])[\s*(]{0,4}[A-Z](?![\w'\u2019]))"
)
# Words between "answer" and "is" must not negate it; words after "is" may only emphasize it.
_ANSWER = (
    r"\b(?:answer|choice|option)\b(?:(?:(?!\b(?:not|never|cannot)\b|n['\u2019]t)[^.:;!?\n]){0,60}?\b(?:is|be)\b"
    r"|[\s*_`)]{0,6}[-:=\u2013])[\s*_`:]{0,6}(?:(?:thus|therefore|clearly|indeed|most likely|probably)\s)?"
    r"(?:(?:the )?(?:option|choice|letter)\b)?"
)
_CHOSEN = (
    re.compile(
        rf"(?:(?i:{_ANSWER}|\\boxed\s?(?=\{{)|<answer>)){_LETTER}"
        # The letter first: B is the correct answer.
        r"|(?<![\w'\u2019(])\(?(?P<right>[A-Z])\)?[*_`]{0,3}\s"
        r"(?i:is (?:the )?(?:(?:correct|right|best) (?:answer|choice|option)|correct|right)\b)"
    ),
    re.compile(r"\*\*\(?(?P<bold>[A-Z])(?:\)?[.:]?\*\*|[).:]{1,2}\s[^*\n]{1,200}\*\*)"),
    re.compile(r"^[ \t]{0,8}[(\[]?(?P<line>[A-Z])[)\].:]{0,2}[ \t]{0,8}$", re.MULTILINE),
)
"""Ways to state a choice, the clearest first."""
_ITEM = re.compile(r"^[ \t]{0,8}\(?([A-Z])[).:]{1,2}[ \t]", re.MULTILINE)


def multiple_choice(
    completions: Completions, answer: list[Any], choices: list[Any] | None = None, *, log_extra: LogExtra | None = None
) -> list[float | None]:
    r"""1.0 if the completion chooses the letter of the column `answer`, else 0.0. docs/rewards/text.md has the ways to
    state a choice. The column `choices` has the texts of each row's choices, which limit the letters. `answer` is a
    letter, the zero-based index of a choice, the text of one of `choices`, or a list of right ones; any other value
    raises ValueError. If `answer` is None, so is the reward."""
    texts = completion_texts(completions)
    rows = [None] * len(texts) if choices is None else choices
    golds = [gold_answers(gold, partial(choice_letter, choices=row)) for gold, row in zip(answer, rows, strict=True)]
    chosen = [chosen_letter(text, row) for text, row in zip(texts, rows, strict=True)]
    return compared(chosen, golds, log_extra)


def choice_letter(answer: Any, choices: Sequence[Any] | None = None) -> str:
    """Return the letter of a choice, given as a letter, a zero-based index or a text; raise ValueError otherwise."""
    letters = _LETTERS if choices is None else _LETTERS[: len(choices)]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        return letters[answer]
    if isinstance(answer, str):
        answer_text = answer.strip()
        if len(answer_text) == 1 and answer_text.upper() in letters:
            return answer_text.upper()
        texts = [str(choice).strip() for choice in choices or ()]
        if answer_text in texts:
            return letters[texts.index(answer_text)]
    what = f"the {len(choices)} choices" if choices is not None else "26 (its text needs a column choices)"
    raise ValueError(f"answer {answer!r} is not the letter, the index from 0 or the text of one of {what}")


def chosen_letter(text: str, choices: Sequence[Any] | None = None) -> str | None:
    """Return the letter that a completion chooses, or None; see `multiple_choice`."""
    letters = _LETTERS if choices is None else _LETTERS[: len(choices)]
    for pattern in _CHOSEN:
        found = [match[match.lastgroup or 0].upper() for match in pattern.finditer(text)]
        if known := [letter for letter in found if letter in letters]:
            return known[-1]
    if len(items := {letter for letter in _ITEM.findall(text) if letter in letters}) == 1:
        return items.pop()
    plain = [str(choice).strip().casefold() for choice in choices or ()]
    completion = text.strip().rstrip(".").casefold()
    return letters[plain.index(completion)] if plain.count(completion) == 1 else None


def language_penalty(completions: Completions, *, scripts: Sequence[str] = ("latin",)) -> list[float | None]:
    """Minus the share of letters that belong to none of the `scripts`, from 0.0 to -1.0. It guards against reasoning
    that drifts into another language (compare the language consistency of DeepSeek-R1, arXiv:2501.12948, section 2.3.2,
    which counts words); see docs/rewards/text.md. Digits and letters that belong to no single script, such as
    mathematical symbols, do not count. `scripts` lists Unicode's names of scripts."""
    if isinstance(scripts, str) or not scripts:
        raise ValueError(f"scripts {scripts!r} must be a list of names, as in [latin]")
    for script in scripts:
        try:
            regex.compile(rf"\p{{Script={script}}}")
        except regex.error:
            raise ValueError(f"scripts: Unicode has no script {script!r}: take latin, greek, han, ...") from None
    letter = regex.compile(r"(?V1)[\p{L}--\p{Script=Common}--\p{Script=Inherited}]")
    wanted = regex.compile("|".join(rf"\p{{Script={script}}}" for script in scripts))
    penalties: list[float | None] = []
    for text in completion_texts(completions):
        letters = letter.findall(text)
        penalties.append(sum(map(bool, map(wanted.match, letters))) / len(letters) - 1 if letters else 0.0)
    return penalties
