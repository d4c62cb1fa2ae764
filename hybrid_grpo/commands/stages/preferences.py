"""Turns rows into pairs of a better and a worse text, for training a reward model.

A text is a prompt with an answer. It is tokenized as it will be when the reward model is used in `rewards`. Rows have
TRL's formats: with or without a prompt column, as text or as chat messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_grpo.config import DataConfig, RewardLoopConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.completion import Message
from hybrid_grpo.data.prompts import prompt_text, require_column
from hybrid_grpo.data.sources import Row, Source, read_rows, training_source
from hybrid_grpo.rewards.models.reward_text import chat_tokens, text_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Preference:
    """A pair of texts; the first is preferred."""

    id: int
    """Row number in its source."""
    chosen_ids: list[int]
    """Tokens of the better text, prompt and answer together."""
    rejected_ids: list[int]
    """Tokens of the worse text."""
    margin: float = 0.0
    """Margin by which the reward of the better text should exceed that of the worse one."""

    @property
    def texts(self) -> tuple[list[int], list[int]]:
        return self.chosen_ids, self.rejected_ids


def read_preferences(
    config: DataConfig, reward: RewardLoopConfig, tokenizer: PreTrainedTokenizerBase, source: Source | None = None
) -> tuple[list[Preference], str]:
    """Return the pairs of a source (default: the training rows), and a line that describes what was read and dropped.

    Raises UserError as `read_rows` does, and if a row is not a pair, a text has no tokens, or all pairs are too long
    (with `over_long: refuse`, if any pair is).
    """
    source = source or training_source(config)
    rows = read_rows(source, config)
    for name in ("chosen_column", "rejected_column"):
        require_column(f"reward.{name}", getattr(reward, name), rows, source)
    if config.prompt_column != DataConfig().prompt_column:
        require_column("data.prompt_column", config.prompt_column, rows, source)
    pairs = [
        _pair(number, row, f"row {number} (from 0) of {source}", config, reward, tokenizer)
        for number, row in enumerate(rows)
    ]
    limit = reward.max_tokens
    kept = [pair for pair in pairs if max(map(len, pair.texts)) <= limit]
    dropped = len(pairs) - len(kept)
    refuse(
        bool(dropped) and config.over_long == "refuse",
        f"reward.max_tokens {limit}: {dropped} of {len(pairs)} pairs of {source} have a longer text: raise the limit,"
        " or set data.over_long to drop",
    )
    refuse(
        not kept, f"reward.max_tokens {limit}: all {len(pairs)} pairs of {source} have a longer text: raise the limit"
    )
    lengths = [len(text) for pair in kept for text in pair.texts]
    why = f", {dropped} dropped for an over-long text" if dropped else ""
    return kept, (
        f"{source}: {len(kept)} of {len(rows)} pairs kept{why}; texts of {min(lengths)} to {max(lengths)} tokens (mean"
        f" {sum(lengths) / len(lengths):.1f}); columns {', '.join(rows[0])}"
    )


def _pair(
    number: int, row: Row, where: str, config: DataConfig, reward: RewardLoopConfig, tokenizer: PreTrainedTokenizerBase
) -> Preference:
    chosen, rejected = (
        _tokens(row, f"reward.{name}_column", getattr(reward, f"{name}_column"), where, config, tokenizer)
        for name in ("chosen", "rejected")
    )
    margin = row.get(reward.margin_column)
    if margin is None:
        return Preference(number, chosen, rejected)
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool) and math.isfinite(margin)
    refuse(not is_number, f"reward.margin_column {reward.margin_column}: {where} has {margin!r:.40}: give a number")
    return Preference(number, chosen, rejected, float(margin))


def _tokens(
    row: Row, setting: str, column: str, where: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    prompt, answer = _parts(row, f"{setting} {column}", row[column], where, config)
    as_chat = isinstance(prompt, list) or config.chat_template == "always"
    refuse(
        as_chat and tokenizer.chat_template is None,
        f"data.chat_template: {where} is a chat, and the tokenizer of policy.model has no chat template: take a chat"
        " model, or give text with data.chat_template auto and no data.system_prompt",
    )
    try:
        ids = (chat_tokens if as_chat else text_tokens)(tokenizer, prompt, answer)
    except Exception as error:  # a template is a program of the model's authors
        raise UserError(f"{setting} {column}: {where} cannot be tokenized: {type(error).__name__} {error}") from error
    refuse(not ids, f"{setting} {column}: {where} is empty: remove the row")
    return ids


def _parts(row: Row, name: str, value: Any, where: str, config: DataConfig) -> tuple[str | list[Message], str]:
    """Return the prompt and the answer of one text of a pair; the prompt is empty if the row has none.

    Messages that begin with an assistant message continue the chat in the prompt column; others replace it.
    """
    prompt = row.get(config.prompt_column)
    match value:
        case str(answer) if prompt is None:
            refuse(
                config.system_prompt is not None or config.chat_template == "always",
                f"{name}: {where} has no prompt, so it is not a chat: give a data.prompt_column, or chat messages, or"
                " remove data.system_prompt and data.chat_template",
            )
            return "", answer
        case str(answer):
            return prompt_text(row, where, config), answer
        case [*before, {"role": "assistant", "content": str(answer)}]:
            if not before or (isinstance(before[0], dict) and before[0].get("role") == "assistant"):
                refuse(
                    not isinstance(prompt, list),
                    f"{name}: {where} begins with the assistant's message, and its prompt is not a chat: give messages"
                    f" in data.prompt_column {config.prompt_column}",
                )
                before = [*(prompt or []), *before]
            return prompt_text({config.prompt_column: before}, where, config), answer
    raise UserError(f"{name}: {where} has {value!r:.40}: give text, or chat messages that end with the assistant's")
