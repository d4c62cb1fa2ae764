"""From logits to tokens: temperature, top-k, top-p, greedy, and a random stream for every completion.

A completion's randomness is a pure function of its stream key and of the number of tokens it has. Keys come
from (run seed, step, prompt, sample), so a rollout is the same on any number of ranks, slots and batch orders.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    max_tokens: int
    """Longest completion."""
    temperature: float = 1.0
    """Softmax temperature; 0 takes the most probable token."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Then keep the smallest set of tokens with at least this probability; 1 keeps all."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a completion (and belong to it)."""


GREEDY = 0.0
"""The temperature that means: take the most probable token."""


def stream_key(*parts: int) -> int:
    """The 64-bit key of one completion's random stream, from what identifies the completion."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(key_n: Tensor, counter_n: Tensor) -> Tensor:
    """Draw `counter_n` of each stream: float32 [n], uniform on the multiples of 2^-23 in [0, 1).

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) started at the key,
    in wrapping int64 arithmetic. 23 bits, so that the product with a float32 total stays below that total.
    """
    x = key_n + (counter_n + 1) * -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    x = x ^ _shift(x, 31)
    return _shift(x, 41).to(torch.float32) * 2.0**-23


def sample(logits_nV: Tensor, sampling: Sampling, key_n: Tensor, counter_n: Tensor) -> tuple[Tensor, Tensor]:
    """Choose one token a row by inverting the cumulative distribution at the stream's next draw.

    Args:
        logits_nV: [n, V], any float type.
        sampling: temperature and filters.
        key_n, counter_n: int64 [n], stream key and number of tokens already drawn from it.

    Returns:
        token_n (int64) and logp_n (float32), the log-probability under the softmax at the sampling temperature
        (at temperature 1 when greedy) over the whole vocabulary: what the training forward computes.
    """
    if sampling.temperature == GREEDY:
        logp_nV = logits_nV.float().log_softmax(-1)
        token_n = logp_nV.argmax(-1)
        return token_n, logp_nV.gather(1, token_n[:, None])[:, 0]
    logp_nV = (logits_nV.float() / sampling.temperature).log_softmax(-1)
    p_nV, order_nV = logp_nV.exp(), None
    if sampling.top_k or sampling.top_p < 1:
        p_nV, order_nV = p_nV.sort(stable=True, dim=-1, descending=True)
        if sampling.top_k:
            p_nV[:, sampling.top_k :] = 0.0
        # A token stays while those before it have less than top_p of what is left: the first always does.
        before_nV = p_nV.cumsum(-1) - p_nV
        p_nV = p_nV.where(before_nV < sampling.top_p * p_nV.sum(-1, keepdim=True), 0.0)
    cumulative_nV = p_nV.cumsum(-1)
    threshold_n = uniform(key_n, counter_n) * cumulative_nV[:, -1]
    # Only tokens with a probability count: a parallel scan need not be monotone to the last bit, so an entry that
    # adds nothing may still stand above the threshold (or, once in a great while, none that adds something).
    above_nV = (cumulative_nV > threshold_n[:, None]) & (p_nV > 0)
    token_n = above_nV.int().argmax(-1).where(above_nV.any(-1), p_nV.argmax(-1))
    if order_nV is not None:
        token_n = order_nV.gather(1, token_n[:, None])[:, 0]
    return token_n, logp_nV.gather(1, token_n[:, None])[:, 0]
