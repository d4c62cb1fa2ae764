"""Settings of cleaning: what is looked for in the rows, and what becomes of the rows that are found."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.fields import SECTION, Count, PositiveShare, Text

Action = Literal["off", "report", "drop"]


@dataclass(frozen=True, config=SECTION)
class CleanConfig:
    """What is looked for in the rows, and what becomes of the rows that are found. `off` does not look, `report` counts
    and shows them, and `drop` also leaves them out of the written rows."""

    output: Text | None = None
    """File of JSON lines for the rows that are kept, as they were read, written anew; `-` is standard output. Default:
    only the report."""
    report: Text | None = None
    """File for the report as JSON, with every row that was found."""
    examples: Count = 3
    """Rows of every kind that are shown."""
    unreadable: Literal["report", "drop"] = "drop"
    """Rows that cannot be read: `data.task` refuses them, or the prompt is missing, empty, neither text nor a chat, or
    refused by the chat template of `policy.model`. Nothing else is looked for in them."""
    encoding: Action = "drop"
    """Prompts and answers with letters that were decoded wrongly: U+FFFD, which stands for an undecodable one, control
    characters, halves of surrogate pairs, or text of another encoding (found by ftfy)."""
    answers: Action = "drop"
    """Answers that are none: missing, empty, a stand-in such as `N/A` or `nan`, or with nothing after their `####` or
    in their `\\boxed{}`."""
    answer_column: Text | None = None
    """Column with the answer. Default: the first of answer, tests, target and `data.completion_column` that there
    is."""
    languages: Action = "off"
    """Prompts in none of `expected_languages`, as py3langid tells by their words. Prompts of fewer than 8 words,
    numbers and formulas not counted, are too short to tell."""
    expected_languages: list[Text] = field(default_factory=lambda: ["en"])
    """Languages of the prompts, by their ISO 639-1 codes such as en, de, zh."""
    lengths: Action = "drop"
    """Prompts of more than `data.max_prompt_tokens`. They are counted in tokens of `policy.model`; without a model,
    lengths are only reported, in words."""
    duplicates: Action = "drop"
    """Prompts that are those of an earlier row, but for capital letters and white space."""
    near_duplicates: Action = "drop"
    """Prompts that are nearly those of an earlier row; see `similarity`."""
    similarity: PositiveShare = 0.5
    """From which similarity on two prompts are nearly the same: the share of words, and of pairs of words that follow
    each other, that both have, among all that either has. Of those found in more than a fifth of the prompts, such as
    the instructions of a task, none is counted. A prompt of which a tenth of the words was exchanged has about 0.75."""
    overlap: Literal["off", "report", "drop", "refuse"] = "drop"
    """Prompts that are held-out prompts as well (`data.eval_split` or `data.eval_path`): equal but for capital letters,
    punctuation and white space, nearly the same (unless `near_duplicates` is off), or with `overlap_words` words in a
    row that a held-out prompt has too. `refuse` ends with exit status 2 where there is one, and writes no rows."""
    overlap_words: Count = 13
    """Words in a row that make an overlap, as in GPT-3 (arXiv:2005.14165, appendix C). A held-out prompt of fewer, but
    at least 8, counts where it is found whole. Words in a row that are in many prompts count for nothing."""
