"""What a model's files allow: lengths of sequences, tokens of its vocabulary, and tokens that end completions."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from hybrid_grpo.config import RolloutConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.model.gguf import files_of
from hybrid_grpo.model.loading import first_line


def check_lengths(
    config: Any, longest: int, lengths: str = "data.max_prompt_tokens + rollout.max_completion_tokens",
    model: str = "policy.model", what: str = "the longest prompt with its completion",
) -> None:  # fmt: skip
    """Raise UserError if sequences of `longest` tokens, the length of `what`, exceed the model's
    `max_position_embeddings`, or a length from which on it computes a token differently in a longer row: longrope
    rotates all positions by other frequencies, and sparse attention (`index_topk`) chooses keys, where rounding decides
    between equal scores. `lengths` are the settings that add up to this length; the message begins with `model`."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or {}
    limits = [(getattr(text, "max_position_embeddings", None), "positions")]
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings")
        limits.append((original, "positions before its rotary embeddings (longrope) change those of shorter sequences"))
    if {"indexed_attention", "compressed_sparse_attention"} & set(getattr(text, "layer_types", None) or []):
        limits.append((text.index_topk, "positions before its attention selects some of them (index_topk)"))
    for limit, of in limits:
        refuse(
            limit is not None and longest > limit,
            f"{model} has {limit} {of}, and {what} is {longest} tokens: limit {lengths} to {limit}",
        )


def vocabulary_of(tokenizer: Any, config: Any = None) -> int:
    """Return the number of ids up to the last that is a token, at most the model's `vocab_size`. A model may be padded
    beyond its tokenizer, with ids that mean nothing."""
    size = 1 + max(_ids(tokenizer, len(tokenizer)))
    return size if config is None else min(size, config.get_text_config().vocab_size)


def gaps_of(tokenizer: Any) -> list[int]:
    """Return the ids before the last token that are not tokens."""
    ids = _ids(tokenizer, len(tokenizer))
    return [] if len(ids) > max(ids) else sorted({*range(max(ids))} - ids)


@lru_cache(maxsize=4)
def _ids(tokenizer: Any, _: int) -> frozenset[int]:
    return frozenset(tokenizer.get_vocab().values())


def check_token_ids(rollout: RolloutConfig, size: int) -> None:
    """Raise UserError if a token id in the settings is not below `size`."""
    for setting, ids in (("stop_ids", rollout.stop_ids), ("logit_bias", map(int, rollout.logit_bias))):
        for token in ids:
            if token >= size:
                raise UserError(f"rollout.{setting} {token} is not a token of policy.model: its ids end at {size - 1}")


def check_prompt_ids(longest: Sequence[list[int]], config: Any) -> None:
    """Raise UserError if a prompt has a token id that is not below the model's `vocab_size`."""
    size = config.get_text_config().vocab_size
    highest = max(map(max, longest))
    if highest >= size:
        raise UserError(
            f"policy.model {config.name_or_path}: its tokenizer gives the token id {highest}, and vocab_size is {size}:"
            " take the tokenizer that belongs to the model"
        )


def own_sampling(name: str) -> dict[str, float]:
    """Return the sampling that a model's generation_config.json asks for, by the names of `rollout`."""
    try:
        own = GenerationConfig.from_pretrained(files_of(name)).to_dict()
    except (OSError, ValueError, TypeError):  # none, or one that `stop_ids` reports
        return {}
    if own.get("do_sample") is False:
        return {"temperature": 0.0}
    return {n: own[n] for n in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty") if own.get(n)}


def stop_ids(name: str, tokenizer: Any, more: list[int], config: Any, setting: str = "policy.model") -> tuple[int, ...]:
    """Return all tokens that end a completion: the tokenizer's EOS, the stop tokens of the model's generation config,
    and `more`. Raises UserError if one is not a token of the model."""
    ids, name = {*more, tokenizer.eos_token_id}, files_of(name, setting)
    generation = Path(name) / "generation_config.json"
    if generation.is_file() or not Path(name).exists():
        try:
            declared = GenerationConfig.from_pretrained(name).eos_token_id
            ids.update(declared if isinstance(declared, list) else [declared])
        except (OSError, ValueError, TypeError) as error:
            # Models on the hub may have no generation config.
            if generation.is_file():
                raise UserError(f"{setting} {name}: generation_config.json: {first_line(error)}") from error
    ids.discard(None)
    vocab_size = config.get_text_config().vocab_size
    own = getattr(config.get_text_config(), "eos_token_id", None)
    for token in [*ids, *(own if isinstance(own, list) else [] if own is None else [own])]:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise UserError(
                f"{setting} {name}: its end-of-sequence token {token!r} (eos_token_id) is not an id below vocab_size"
                f" {vocab_size}: no completion would end: correct its generation_config.json, config.json or tokenizer"
            )
    # Others of a padded vocabulary are never sampled.
    return tuple(sorted(token for token in ids if token < vocabulary_of(tokenizer, config)))
