"""Settings of cleaning: the checks on the rows, and what happens to rows that fail them."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Count, Place, PositiveShare, Text

Action = Literal["off", "report", "drop"]


@dataclass(frozen=True, config=SECTION)
class CleanConfig(FeatureConfig):
    """Checks on the rows, and what happens to rows that fail them. `off` skips the check, `report` counts and shows the
    rows, and `drop` also leaves them out of the output."""

    output: Place | None = None
    """File of JSON lines for the rows that are kept, which are not changed. An existing file is replaced, and `-` is
    standard output. Default: only the report."""
    report: Text | None = None
    """File for the report as JSON, with every row that was found."""
    examples: Count = 3
    """Number of rows of each kind that are shown."""
    unreadable: Literal["report", "drop"] = "drop"
    """Rows that cannot be read: `data.task` refuses them, or the prompt is missing, empty, neither text nor a chat, or
    refused by the chat template of `policy.model`. No other check applies to them."""
    encoding: Action = "drop"
    """Prompts and answers with wrongly decoded text: U+FFFD (which replaces undecodable characters), control
    characters, halves of surrogate pairs, or text decoded with a wrong encoding (found by ftfy)."""
    answers: Action = "drop"
    """Answers without content: missing, empty, a placeholder such as `N/A` or `nan`, or with nothing after `####` or
    inside `\\boxed{}`."""
    answer_column: Text | None = None
    """Column with the answer. Default: the first that exists of answer, tests, target and `data.completion_column`."""
    languages: Action = "off"
    """Prompts whose language, as py3langid classifies it, is not one of `expected_languages`. Prompts of fewer than 8
    words, not counting numbers and formulas, are too short to classify."""
    expected_languages: list[Text] = field(default_factory=lambda: ["en"])
    """Languages of the prompts, by their ISO 639-1 codes such as en, de, zh."""
    lengths: Action = "drop"
    """Prompts longer than `data.max_prompt_tokens`. They are counted in tokens of `policy.model`; without a model,
    lengths are only reported, in words."""
    duplicates: Action = "drop"
    """Prompts equal to the prompt of an earlier row, ignoring case and white space."""
    near_duplicates: Action = "drop"
    """Prompts nearly equal to the prompt of an earlier row; see `similarity`. Those with fewer than about eight words
    that other prompts do not share are reported and kept: one number may make another task of them."""
    similarity: PositiveShare = 0.5
    """Minimum similarity of near duplicates: the number of words and pairs of consecutive words that both prompts have,
    divided by the number that at least one has. Words and pairs in more than a fifth of the prompts, such as
    instructions, are not counted. If a tenth of the words of a prompt are replaced, the similarity is about 0.75."""
    overlap: Literal["off", "report", "drop", "refuse"] = "drop"
    """Prompts that overlap with held-out prompts (`data.eval_split` or `data.eval_path`): equal, ignoring case,
    punctuation and white space; nearly equal (unless `near_duplicates` is off); or sharing `overlap_words` consecutive
    words. If there is such a prompt, `refuse` writes no rows and exits with status 2."""
    overlap_words: Count = 13
    """Consecutive words that count as an overlap, as in GPT-3 (arXiv:2005.14165, appendix C). A shorter held-out prompt
    of at least 8 words counts if all of it is found. Word sequences that many prompts share do not count."""

    page = "docs/cleaning.md"
    command = (
        "data",
        "duplicates, overlap with held-out prompts and faults of a data set: a report, and the cleaned rows",
    )
