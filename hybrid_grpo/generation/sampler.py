"""Turns logits into tokens, with penalties, filters, and a random stream for every completion.

A completion's randomness is a pure function of its stream key and the number of its tokens. Keys are made from (run
seed, step, prompt, sample), so a rollout is the same for any number of ranks or slots and any order of prompts.
"""

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hybrid_grpo.generation.categorical import ONE, UNIT, Filters, sample
from hybrid_grpo.model.kernels import decoding
from hybrid_grpo.model.kernels.build import usable
from hybrid_grpo.model.support import packed, unpacked


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and completions end; see the settings of the same names in `RolloutConfig`.

    In the order of transformers: repetition penalty (CTRL, arXiv:1909.05858 section 4.1), minimum length, logit bias,
    temperature, top-k, top-p, min-p.
    """

    max_tokens: int
    """Maximum number of tokens of a completion."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion; the completion includes them."""
    max_turn_tokens: int = sys.maxsize
    """Maximum number of tokens of a turn; a turn that is cut at this limit is the last."""
    min_tokens: int = 0
    """Stop tokens cannot be drawn, and stop strings are ignored, before this many tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, amount added to its logit)."""
    stop_strings: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these in its text."""
    vocabulary: int = sys.maxsize
    """The softmax is over the ids below this: a model may be padded beyond the tokens of its tokenizer."""
    logprobs: Literal["softmax", "sampling", "mask"] = "softmax"
    """The distribution whose log-probabilities are recorded. `softmax` is over the whole vocabulary at the temperature
    (1 if greedy), as in the training forward; `sampling` is the distribution that the token was drawn from;
    with `mask`, its support is recorded too."""


GREEDY = 0.0
"""The temperature that selects the most probable token."""


def stream_key(*parts: int | str) -> int:
    """Return the 64-bit key of a completion's random stream, made from the values that identify the completion."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def on_device(sampling: Sampling) -> Sampling:
    """Return a sampling that chooses the same tokens, and is equal for all that do."""
    stop_ids = sampling.stop_ids if sampling.min_tokens else ()
    return replace(sampling, max_tokens=0, max_turn_tokens=0, stop_strings=(), stop_ids=stop_ids)


class Sampler:
    """Chooses tokens as `sampling` says; `device` is the device of the logits."""

    def __init__(self, sampling: Sampling, device: torch.device | str = "cpu") -> None:
        self.sampling = sampling
        self._stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=device)
        self._biased = torch.tensor([token for token, _ in sampling.logit_bias], dtype=torch.int64, device=device)
        self._bias = torch.tensor([bias for _, bias in sampling.logit_bias], device=device)
        self.needs_seen = sampling.repetition_penalty != 1.0
        """Whether `__call__` needs `seen_nV`."""
        self._delays_stops = bool(sampling.min_tokens and sampling.stop_ids)
        self._changes_logits = bool(self.needs_seen or sampling.logit_bias or self._delays_stops)
        self._filters = _filters_of(sampling)
        filters = sampling.top_k or sampling.top_p < 1 or sampling.min_p
        self._is_plain = not (self._changes_logits or filters)
        """Whether tokens are drawn from the unchanged softmax at the temperature."""

    def __call__(
        self, logits_nV: Tensor, key_n: Tensor, counter_n: Tensor, seen_nV: Tensor | None = None,
        alike: decoding.Alike | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Choose one token for each row, int64 [n], and return it with its log-probability, float32 [n], and its
        support, if that is recorded, as `packed` returns it; see `Sampling.logprobs`. For the other arguments see
        `categorical.sample`. The call can be part of a CUDA graph.

        Args:
            seen_nV: bool, True for tokens of the prompt or the completion so far; required for a repetition penalty.
            alike: the logits are those of texts, which rows share.
        """
        sampling = self.sampling
        if sampling.vocabulary < logits_nV.shape[1]:
            logits_nV = logits_nV[:, : sampling.vocabulary]
            seen_nV = None if seen_nV is None else seen_nV[:, : sampling.vocabulary]
        if self._is_plain and usable(logits_nV):
            return decoding.sample(logits_nV.contiguous(), key_n, counter_n, sampling.temperature, alike)
        logits_nV = logits_nV if alike is None else alike.spread(logits_nV)
        drawn_nV = self._changed(logits_nV.float(), counter_n, seen_nV) if self._changes_logits else logits_nV
        token_n, logp_n, kept_logp_n, kept_nV = sample(drawn_nV, key_n, counter_n, self._filters)
        if sampling.logprobs != "softmax":
            # Greedy choice draws from no distribution: the softmax after penalties stands in for one.
            logp_n = logp_n if sampling.temperature == GREEDY else kept_logp_n
        elif self._changes_logits:
            plain_nV = logits_nV.float() * self._filters.inverse_temperature
            logp_n = plain_nV.gather(1, token_n[:, None])[:, 0] - plain_nV.logsumexp(-1)
        if kept_nV is None:
            return token_n, logp_n
        # Where no logit is finite, a token is chosen although none is kept.
        return token_n, logp_n, packed(kept_nV.scatter_(1, token_n[:, None], True))

    def _changed(self, logits_nV: Tensor, counter_n: Tensor, seen_nV: Tensor | None) -> Tensor:
        penalty = self.sampling.repetition_penalty
        if self.needs_seen:
            assert seen_nV is not None, "a repetition penalty needs the tokens so far"
            penalized_nV = torch.where(logits_nV > 0, logits_nV / penalty, logits_nV * penalty)
            logits_nV = torch.where(seen_nV, penalized_nV, logits_nV)
        if self._delays_stops:
            early_n = counter_n < self.sampling.min_tokens
            stops_ns = logits_nV[:, self._stop_ids].masked_fill(early_n[:, None], float("-inf"))
            logits_nV = logits_nV.index_copy(1, self._stop_ids, stops_ns)
        if self.sampling.logit_bias:
            logits_nV = logits_nV.index_add(1, self._biased, self._bias.expand(len(logits_nV), -1))
        return logits_nV


def to_lists(chosen: Sequence[Tensor]) -> tuple[list[int], list[float], list[np.ndarray | None]]:
    """Return what a `Sampler` has returned as lists: for each row the token, its log-probability and the ids of its
    support (None if that is not recorded). Waits for the device."""
    token_n, logp_n, *bits = chosen
    tokens = list(map(int, token_n.tolist()))
    return tokens, logp_n.tolist(), [*unpacked(bits[0].cpu().numpy())] if bits else [None] * len(tokens)


def _filters_of(sampling: Sampling) -> Filters:
    names_kept = sampling.logprobs == "mask"
    if sampling.temperature == GREEDY:
        return Filters(least_weight=UNIT, greedy=True, names_kept=names_kept)
    top_p = max(1, round(sampling.top_p * ONE))
    least_weight = math.ceil(sampling.min_p * UNIT)
    return Filters(1 / sampling.temperature, sampling.top_k, top_p, least_weight, names_kept=names_kept)
