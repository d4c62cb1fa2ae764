"""Settings of cleaning: what is looked for in the rows, and what happens to the rows that are found."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from hybrid_grpo.config.features import FeatureConfig
from hybrid_grpo.config.fields import SECTION, Count, PositiveShare, Text

Action = Literal["off", "report", "drop"]


@dataclass(frozen=True, config=SECTION)
class CleanConfig(FeatureConfig):
    """What is looked for in the rows, and what happens to the rows that are found. `off` skips the check, `report`
    counts and shows them, and `drop` also leaves them out of the output."""

    output: Text | None = None
    """File of JSON lines for the rows that are kept, unchanged; an existing file is replaced, and `-` is standard
    output. Default: only the report."""
    report: Text | None = None
    """File for the report as JSON, with every row that was found."""
    examples: Count = 3
    """Rows of every kind that are shown."""
    unreadable: Literal["report", "drop"] = "drop"
    """Rows that cannot be read: `data.task` refuses them, or the prompt is missing, empty, neither text nor a chat, or
    refused by the chat template of `policy.model`. Nothing else is looked for in them."""
    encoding: Action = "drop"
    """Prompts and answers with wrongly decoded characters: U+FFFD, which replaces undecodable ones, control characters,
    halves of surrogate pairs, or text in another encoding (found by ftfy)."""
    answers: Action = "drop"
    """Answers without content: missing, empty, a placeholder such as `N/A` or `nan`, or with nothing after their `####`
    or in their `\\boxed{}`."""
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
    """Prompts that repeat an earlier row, ignoring case and white space."""
    near_duplicates: Action = "drop"
    """Prompts that nearly repeat an earlier row; see `similarity`."""
    similarity: PositiveShare = 0.5
    """Least similarity of near duplicates: the number of words and pairs of consecutive words that both prompts have,
    divided by the number that either has. What more than a fifth of the prompts share, such as the instructions of a
    task, is not counted. A prompt in which a tenth of the words were replaced has about 0.75."""
    overlap: Literal["off", "report", "drop", "refuse"] = "drop"
    """Prompts that are also held-out prompts (`data.eval_split` or `data.eval_path`): equal, ignoring case, punctuation
    and white space; nearly equal (unless `near_duplicates` is off); or sharing `overlap_words` consecutive words.
    `refuse` ends with exit status 2 if there is one, and writes no rows."""
    overlap_words: Count = 13
    """Consecutive words that make an overlap, as in GPT-3 (arXiv:2005.14165, appendix C). A held-out prompt of fewer,
    but at least 8, counts if it is found whole. Word sequences that many prompts share are not counted."""

    page = "docs/cleaning.md"
    command = "data"
    summary = "duplicates, overlap with held-out prompts and faults of a data set: a report, and the cleaned rows"
