"""Which tokens of a rollout are learned from, or are held to the policy that sampled.

A selection is a function of the whole rollout, on all ranks: neither micro-batches nor the number of ranks change it.
"""

import math
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Numbers, Rollout
from hybrid_grpo.grpo.baselines import Total
from hybrid_grpo.grpo.minibatches import in_loss


@dataclass(frozen=True)
class OldPolicy:
    """What is known of the policy that sampled, at each token, float32 [B, T]."""

    logp_BT: Tensor | None
    """Log-probabilities; None if nothing needs them before the first optimizer step."""
    entropy_BT: Tensor | None = None
    """Entropies in nats; None if nothing needs them."""
    squares_BT: Tensor | None = None
    """Sums of the squares of all probabilities; None if nothing needs them."""


def select_tokens(
    rollout: Rollout, advantages_BT: Tensor, old: OldPolicy, grpo: GrpoConfig, sum_over_ranks: Total
) -> tuple[Tensor, Tensor | None, Numbers]:
    """Return the advantages, 0 where a token is left out; the tokens whose drift is penalized (bool [B, T], None for
    all); and metrics. Only tokens that the policy wrote and that are in the loss are selected or left out. Collective.

    With N such tokens on all ranks, and n = ceil(tokens_share * N), where tokens that equal the last of n up to
    rounding are chosen too:

    `top_entropy`: the n tokens of the highest entropy are learned from (arXiv:2506.01939).

    The others look at the covariance of a token's advantage and log-probability: the product of their distances to the
    means over all N tokens (arXiv:2505.22617). The log-probability is that of the policy that sampled, which in
    the first optimizer step is the policy of the paper. `clip_cov`: n tokens drawn among those whose covariance is
    within [cov_low, cov_high] are not learned from. `kl_cov`: the drift is a term of the n tokens of the
    highest covariance alone.
    """
    pairs = zip(rollout.completions, in_loss(rollout, grpo), strict=True)
    own_BT = rollout.mask_BT & torch.tensor([counts and not completion.writer for completion, counts in pairs])[:, None]
    number = math.ceil(grpo.tokens_share * float(sum_over_ranks(own_BT.sum())))
    if grpo.tokens == "top_entropy":
        assert old.entropy_BT is not None
        chosen_BT = own_BT & _largest(_coarse(old.entropy_BT.cpu()), own_BT, number, sum_over_ranks)
    else:
        assert old.logp_BT is not None
        covariance_BT = _coarse(_covariances(advantages_BT.cpu(), old.logp_BT.cpu(), own_BT, sum_over_ranks))
        if grpo.tokens == "kl_cov":
            chosen_BT = own_BT & _largest(covariance_BT, own_BT, number, sum_over_ranks)
        else:
            among_BT = own_BT & (covariance_BT >= grpo.cov_low) & (covariance_BT <= grpo.cov_high)
            chosen_BT = own_BT & ~(among_BT & _largest(_draws(rollout), among_BT, number, sum_over_ranks))
    numbers: Numbers = {"policy/selected_frac": (chosen_BT[own_BT].double().mean(), own_BT.sum())}
    if grpo.tokens == "kl_cov":
        return advantages_BT, chosen_BT.to(advantages_BT.device), numbers
    left_out_BT = (own_BT & ~chosen_BT).to(advantages_BT.device)
    return torch.where(left_out_BT, 0.0, advantages_BT), None, numbers


def _covariances(advantages_BT: Tensor, logp_BT: Tensor, own_BT: Tensor, sum_over_ranks: Total) -> Tensor:
    values_2BT = torch.stack([advantages_BT, logp_BT]).double()
    sums = sum_over_ranks(torch.cat([values_2BT[:, own_BT].sum(1), own_BT.sum().double()[None]]))
    distances_2BT = values_2BT - (sums[:2] / sums[2].clamp(min=1))[:, None, None]
    return distances_2BT.prod(0).float()


def _coarse(values: Tensor) -> Tensor:
    """Return float32 numbers rounded to 13 bits. The first tokens of a group's completions have one entropy but for
    rounding, which would decide among them, in another way on another number of ranks."""
    return ((values.contiguous().view(torch.int32) + 0x400) & ~0x7FF).view(torch.float32)


def _draws(rollout: Rollout) -> Tensor:
    """A number in [0, 1) for each token, float32 [B, T], that follows from its completion and its place in it."""
    draws_BT = torch.zeros(rollout.mask_BT.shape)
    for row, completion in enumerate(rollout.completions):
        stream = np.random.default_rng(zlib.crc32(np.asarray(completion.token_ids, np.int32).tobytes()))
        draws_BT[row, : len(completion.token_ids)] = torch.from_numpy(stream.random(len(completion.token_ids))).float()
    return draws_BT


def _largest(values_BT: Tensor, among_BT: Tensor, number: int, sum_over_ranks: Total) -> Tensor:
    """Return where a value is among the `number` largest in `among_BT` on all ranks, or equals the last of them."""
    number = min(number, int(sum_over_ranks(among_BT.sum())))
    if number == 0:
        return torch.zeros_like(among_BT)
    return values_BT >= nth_largest(values_BT[among_BT], number, sum_over_ranks)


def nth_largest(values_N: Tensor, n: int, sum_over_ranks: Total) -> float:
    """Return the n-th largest of the float32 values on all ranks, which are n or more. Collective: four sums.

    It is found byte by byte: from how many values have each byte, among those whose bytes above it are found.
    """
    bits_N = values_N.contiguous().view(torch.int32).long()
    # Keys compare as their values do: the bits of negative values are reversed, and lie below all others.
    key_N = torch.where(bits_N < 0, ~bits_N & 0xFFFFFFFF, bits_N + 0x80000000)
    found = 0
    for shift in (24, 16, 8, 0):
        among_N = key_N[key_N >> (shift + 8) == found]
        above = sum_over_ranks(torch.bincount(among_N >> shift & 0xFF, minlength=256)).flip(0).cumsum(0)
        place = int((above < n).sum())
        n -= int(above[place - 1]) if place else 0
        found = found << 8 | (255 - place)
    bits = found - 0x80000000 if found >= 0x80000000 else ~found & 0xFFFFFFFF
    return float(np.array(bits, np.uint32).view(np.float32))
