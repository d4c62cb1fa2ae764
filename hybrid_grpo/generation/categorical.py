"""Draws one token from each row of logits, using the row's own random stream.

Probabilities are integers in units of 2^-40 times the probability of the most probable token. A sum of integers is the
same in any order, so draws and filters do not depend on rounding: torch and the GPU kernel draw the same token, unless
their exponentials differ in the last bit at the very edge of a draw. Filters keep or drop equal logits together.
"""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from hybrid_grpo.model.kernels import gpu

UNIT = 1 << 40
ONE = 1 << 23
"""The integer that stands for a top-p of 1; also the number of different draws."""
Sampled = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Filters:
    """Decides which tokens can be drawn; the fields are in the order in which they are applied."""

    inverse_temperature: float = 1.0
    top_k: int = 0
    """Number of most probable tokens to keep; 0 keeps all."""
    top_p: int = ONE
    """A token is kept if the more probable tokens have less than this share of the total, in units of 2^-23."""
    least_weight: int = 0
    """Smallest probability that is kept, in units of 2^-40 times the probability of the most probable token."""
    greedy: bool = False
    """Whether to take the first of the tokens that are kept, instead of drawing one."""
    names_kept: bool = False
    """Whether to return which tokens are kept."""


def _shift(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of int64 numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(key_n: Tensor, counter_n: Tensor) -> Tensor:
    """Return draw number `counter_n` of each stream: int64 [n], uniform on 0 to 2^23 - 1.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), started at the key, in
    wrapping int64 arithmetic.
    """
    x = key_n + (counter_n + 1) * -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    x = x ^ _shift(x, 31)
    return _shift(x, 41)


def sample(logits_nV: Tensor, key_n: Tensor, counter_n: Tensor, filters: Filters) -> Sampled:
    """Draw tokens (int64 [n]), and return them with their log-probabilities over the whole vocabulary and over the
    tokens that the filters keep (both float32 [n]); then, if asked for, which tokens are kept (bool [n, V]), or None.

    The cumulative distribution is inverted at the stream's next draw. A row whose largest logit is not finite gets
    token 0 and NaN. Nothing waits for the device, and no shape depends on a value.

    Args:
        logits_nV: any float type.
        key_n, counter_n: int64, the key of each stream and the number of tokens already drawn from it.
    """
    device, dtype, vocabulary = logits_nV.device, logits_nV.dtype, logits_nV.shape[1]
    if gpu.usable(logits_nV) and gpu.proven("sampling", _kernel_agrees, device, dtype, vocabulary, filters):
        return gpu.sampling.sample(logits_nV, key_n, counter_n, *astuple(filters))
    return in_torch(logits_nV, key_n, counter_n, filters)


def in_torch(logits_nV: Tensor, key_n: Tensor, counter_n: Tensor, filters: Filters) -> Sampled:
    """`sample` in torch, on any device."""
    logits_nV = logits_nV.float()
    peak_n1 = logits_nV.amax(-1, keepdim=True)

    def weights(logits: Tensor) -> Tensor:
        return (((logits - peak_n1) * filters.inverse_temperature).exp() * UNIT).nan_to_num(0.0).long()

    weight_nV = weights(logits_nV)
    kept_nV = weight_nV.where(weight_nV >= filters.least_weight, 0) if filters.least_weight else weight_nV
    if filters.top_k:
        lowest_n1 = logits_nV.topk(min(filters.top_k, logits_nV.shape[1])).values[:, -1:]
        kept_nV = kept_nV.where(logits_nV >= lowest_n1, 0)
    if filters.top_p < ONE:
        order_nV = logits_nV.sort(-1, descending=True).values
        sorted_nV = weights(order_nV)
        if filters.top_k:
            sorted_nV = sorted_nV.where(order_nV >= lowest_n1, 0)
        cumulative_nV = sorted_nV.cumsum(-1)
        inside_nV = cumulative_nV - sorted_nV < _portion(cumulative_nV[:, -1:], filters.top_p)
        lowest_n1 = order_nV.where(inside_nV, torch.inf).amin(-1, keepdim=True)
        kept_nV = kept_nV.where(logits_nV >= lowest_n1, 0)
    cumulative_nV = kept_nV.cumsum(-1)
    kept_n = cumulative_nV[:, -1]
    target_n = _portion(kept_n, 0 if filters.greedy else draw(key_n, counter_n))
    token_n = (cumulative_nV > target_n[:, None]).int().argmax(-1)
    gap_n = (logits_nV.gather(1, token_n[:, None]) - peak_n1)[:, 0] * filters.inverse_temperature
    logp_n, kept_logp_n = (gap_n - (total.float() / UNIT).log() for total in (weight_nV.sum(-1), kept_n))
    return token_n, logp_n, kept_logp_n, kept_nV > 0 if filters.names_kept else None


def _portion(total: Tensor, of_2_23: Tensor | int) -> Tensor:
    """total * of_2_23 / 2^23, rounded down, without overflow for totals below 2^63."""
    return (total >> 23) * of_2_23 + ((total & ONE - 1) * of_2_23 >> 23)


def _kernel_agrees(device: torch.device, dtype: torch.dtype, vocabulary: int, filters: Filters) -> bool:
    """Whether the GPU kernel draws the same tokens as torch; each combination of filters compiles to its own kernel."""
    generator = torch.Generator().manual_seed(0)
    logits_nV = (3 * torch.randn(4, vocabulary, generator=generator)).to(device, dtype)
    key_n, counter_n = torch.randint(1 << 62, (2, 4), generator=generator).to(device)
    token_n, *logp, kept = in_torch(logits_nV, key_n, counter_n, filters)
    chosen_n, *scored, also_kept = gpu.sampling.sample(logits_nV, key_n, counter_n, *astuple(filters))
    same_kept = kept is None or also_kept is None or torch.equal(kept, also_kept)
    close = torch.allclose(torch.stack(logp), torch.stack(scored), atol=1e-5)
    return torch.equal(token_n, chosen_n) and close and same_kept
