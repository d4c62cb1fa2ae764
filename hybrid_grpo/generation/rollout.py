"""Generation with the settings of `rollout`: makes the `Sampling` and the requests, and calls the chosen decoder."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal

from hybrid_grpo import generation
from hybrid_grpo.config import RolloutConfig
from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.generation import Callbacks, Request, Sampling, Stats, Workspace, fallback, stream_key
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.limits import gaps_of, vocabulary_of


def sampling_of(config: RolloutConfig, stop_ids: tuple[int, ...], *, greedy: bool = False) -> Sampling:
    """Return how tokens are chosen and completions end; `stop_ids` must include the stop tokens of `config`.

    Greedy completions end by the same rules but ignore all other settings, since they measure the model: filters would
    have no effect, and penalties or biases would change what is measured.
    """
    ends = Sampling(
        max_tokens=config.max_completion_tokens, max_turn_tokens=config.max_turn_tokens or Sampling.max_turn_tokens,
        min_tokens=config.min_completion_tokens, stop_ids=() if config.ignore_eos else stop_ids,
        stop_strings=tuple(config.stop_strings),
    )  # fmt: skip
    if greedy:
        return replace(ends, temperature=generation.GREEDY)
    return replace(
        ends, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in config.logit_bias.items()), logprobs=config.logprobs,
    )  # fmt: skip


def requests_of(prompts: Sequence[Prompt], config: RolloutConfig, seed: int, step: int) -> list[Request]:
    """Return requests for completions. Their random streams depend neither on ranks nor on the order of prompts."""
    size = config.num_generations
    return [
        request_of(p, config, [stream_key(seed, p.first_step or step, p.epoch, p.id, k) for k in range(size)])
        for p in prompts
    ]


def request_of(prompt: Prompt, config: RolloutConfig, keys: list[int]) -> Request:
    """Return a request for completions of a prompt whose random streams have these keys."""
    limit = config.longest(len(prompt.token_ids), opened=prompt.opening is not None)
    return Request(prompt.token_ids, keys, max_total_tokens=limit, prompt=prompt)


def attention_of(decoder: Literal["paged", "transformers"]) -> str | None:
    """Return the attention implementation that a model needs for `complete`; None for one of transformers' own."""
    return ATTENTION if decoder == "paged" else None


def complete(
    model: Any, tokenizer: Any, requests: list[Request], sampling: Sampling, config: RolloutConfig,
    callbacks: Callbacks | None = None, workspace: Workspace | None = None,
) -> tuple[list[list[Completion]], Stats]:  # fmt: skip
    """Complete every request with the decoder that `config` names. `model` has the attention that `attention_of` names.
    For the other arguments and the result see `generation.generate`."""
    vocabulary, never = _vocabulary(tokenizer, len(tokenizer))
    sampling = replace(sampling, vocabulary=vocabulary, logit_bias=(*sampling.logit_bias, *never))
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    callbacks = replace(callbacks or Callbacks(), decode=decode)
    if config.decoder != "paged":
        return fallback.generate(model, requests, sampling, callbacks, max_slots=config.max_slots)
    return generation.generate(
        model, requests, sampling, callbacks, max_slots=config.max_slots, prefill_tokens=config.prefill_tokens,
        cache_gb=config.cache_gb, workspace=workspace,
    )  # fmt: skip


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, _: int) -> tuple[int, tuple[tuple[int, float], ...]]:
    """Return the number of tokens, and the bias of the ids among them that are none; `_` is the tokenizer's length."""
    return vocabulary_of(tokenizer), tuple((token, -math.inf) for token in gaps_of(tokenizer))
