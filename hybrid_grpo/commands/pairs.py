"""Turns rows into pairs of a prompt and the completion to learn, for supervised fine-tuning.

Prompts are read in the same way as for GRPO, so that the policy later samples from the same tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.chat_template import ended_ids
from hybrid_grpo.data.completions import end_of
from hybrid_grpo.data.pictures import ImageStore
from hybrid_grpo.data.prompts import data_line, prompts_of, require_column
from hybrid_grpo.data.sources import read_rows, training_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pair:
    prompt: Prompt
    completion_ids: list[int]
    """Target tokens; the last ends the completion."""


def read_pairs(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, max_completion_tokens: int, album: ImageStore | None = None,
    *, ends: Collection[int] = (),
) -> tuple[list[Pair], str]:  # fmt: skip
    """Return the training pairs, and a line that describes what was read and dropped.

    A pair is dropped if its completion, including the token that ends it, has more than `max_completion_tokens` tokens.
    `ends` are the tokens that end the policy's completions; see `end_of`. Collective, as `read_prompts` is. Raises
    UserError as it does, and if a completion is missing or all completions are too long.
    """
    refuse(
        tokenizer.eos_token_id is None,
        "policy.model: its tokenizer has no end-of-sequence token: set eos_token in its tokenizer_config.json",
    )
    refuse(
        config.completion_column == config.prompt_column,
        f"data.completion_column and data.prompt_column are both {config.prompt_column}: change one",
    )
    source = training_source(config)
    rows = read_rows(source, config)
    require_column("data.completion_column", config.completion_column, rows, source)
    pairs = [
        Pair(prompt, _completion_ids(rows[prompt.id][config.completion_column], prompt, config, tokenizer, ends))
        for prompt in prompts_of(rows, source, config, tokenizer, album)
    ]
    shortest = min(len(pair.completion_ids) for pair in pairs)
    refuse(
        shortest > max_completion_tokens,
        f"sft.max_completion_tokens {max_completion_tokens}: all {len(pairs)} completions of {source} are longer,"
        f" the shortest has {shortest} tokens: raise the limit",
    )
    kept = [pair for pair in pairs if len(pair.completion_ids) <= max_completion_tokens]
    return kept, data_line(source, rows, [pair.prompt for pair in kept], len(pairs) - len(kept))


def _completion_ids(
    value: Any, prompt: Prompt, config: DataConfig, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]
) -> list[int]:
    """Return the target tokens of a text or a list of one assistant message, with one token at the end that ends it."""
    where = f"data.completion_column {config.completion_column}: row {prompt.id} (from 0)"
    match value:
        case str(text) | [{"role": "assistant", "content": str(text)}] if not _thoughts(value):
            end = end_of(prompt, config, tokenizer, ends)
            assert end is not None, "read_pairs refuses tokenizers without end-of-sequence"
            return ended_ids(tokenizer, text, end, {tokenizer.eos_token_id, *ends})
        case [{"role": "assistant", "content": [{"type": "text", "text": str(text)}]} as message]:
            return _completion_ids([{**message, "content": text}], prompt, config, tokenizer, ends)
    also = f" without {_thoughts(value)}, which belongs into its text" if _thoughts(value) else ""
    raise UserError(f"{where} has {value!r:.40}: give text or a list of one assistant message{also}")


def _thoughts(value: Any) -> str:
    """Return the keys of an answer whose values are not part of its text."""
    message = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else {}
    return " and ".join(name for name in ("tool_calls", "reasoning_content", "thinking") if message.get(name))
