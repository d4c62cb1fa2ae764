"""How the ratio of the policy to the one that sampled becomes what a token's loss maximizes: LOG_RATIOS, SURROGATES.

The papers: PPO is arXiv:1707.06347, DAPO arXiv:2503.14476, GSPO arXiv:2507.18071, CISPO (MiniMax-M1) arXiv:2506.13585,
RLOO arXiv:2402.14740, DPPO arXiv:2602.04879, SAPO arXiv:2511.20347, GMPO arXiv:2507.20673. Shapes are explained in
data/batch.py. All arguments are 0 outside the mask.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_grpo.config import GrpoConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this, to keep exp from overflowing; such a ratio is far outside any clip range anyway."""

_MOST_LOGP = -1e-12
"""Largest log-probability whose complement is taken, so that its logarithm is finite."""


def _sequence_log_ratio(log_ratio_bT: Tensor, real_bT: Tensor) -> Tensor:
    mean_b1 = mean_over_tokens(log_ratio_bT.detach(), real_bT)
    return mean_b1 + (log_ratio_bT - log_ratio_bT.detach())


def _product_log_ratio(log_ratio_bT: Tensor, real_bT: Tensor) -> Tensor:
    sum_b1, count_b1 = log_ratio_bT.detach().sum(1, keepdim=True), real_bT.sum(1, keepdim=True)
    return sum_b1 + count_b1 * (log_ratio_bT - log_ratio_bT.detach())


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio_bT, real_bT: log_ratio_bT,
    "sequence": _sequence_log_ratio,
    "product": _product_log_ratio,
}
"""Functions of the tokens' log-ratios and the mask of real tokens that return the log-ratios for the loss, [b, T].

`sequence` has, at every token, the value of GSPO's s = exp(mean over tokens of log(policy / old)) (GSPO eq. 7), and
passes the gradient to that token alone (GSPO-token: s_t = sg[s] policy_t / sg[policy_t]). If a row's tokens share
weight and advantage, this is the gradient of GSPO's own objective (eq. 5): each of its n tokens contributes 1 / n to s.

`product` is the ratio of the completion's probabilities, exp(sum over tokens of log(policy / old)), as RLOO takes the
completion for one action; with loss_type grpo (each token weighs 1 / n), value and gradient are those of that ratio.
"""


@dataclass(frozen=True)
class Tokens:
    """What a surrogate is made of, each [b, T]."""

    log_ratio_bT: Tensor
    """log(policy / old) of the token itself, whatever `importance` is; carries the gradient."""
    logp_bT: Tensor
    advantages_bT: Tensor
    real_bT: Tensor


Surrogate = tuple[Tensor, Tensor, Tensor]
"""The objective of each token, to maximize, and where its gradient is cut as the policy moved too far down, and up."""


def _clip(ratio_bT: Tensor, tokens: Tokens, grpo: GrpoConfig) -> Surrogate:
    advantages_bT, low, high = tokens.advantages_bT, 1 - grpo.epsilon_low, 1 + grpo.epsilon_high
    gain_bT = torch.minimum(ratio_bT * advantages_bT, ratio_bT.clamp(low, high) * advantages_bT)
    if grpo.dual_clip is not None:
        bounded_bT = torch.maximum(gain_bT, grpo.dual_clip * advantages_bT)
        gain_bT = torch.where(advantages_bT < 0, bounded_bT, gain_bT)
    return gain_bT, (ratio_bT < low) & (advantages_bT < 0), (ratio_bT > high) & (advantages_bT > 0)


def _cispo(ratio_bT: Tensor, tokens: Tokens, grpo: GrpoConfig) -> Surrogate:
    advantages_bT, high = tokens.advantages_bT, 1 + grpo.epsilon_high
    gain_bT = ratio_bT.detach().clamp(max=high) * advantages_bT * tokens.logp_bT
    return gain_bT, torch.zeros_like(gain_bT, dtype=torch.bool), (ratio_bT > high) & (advantages_bT != 0)


def _sapo(ratio_bT: Tensor, tokens: Tokens, grpo: GrpoConfig) -> Surrogate:
    tau_bT = torch.full_like(ratio_bT, grpo.tau_neg).masked_fill(tokens.advantages_bT > 0, grpo.tau_pos)
    gain_bT = torch.sigmoid(tau_bT * (ratio_bT - 1)) * 4 / tau_bT * tokens.advantages_bT
    never_bT = torch.zeros_like(gain_bT, dtype=torch.bool)
    return gain_bT, never_bT, never_bT


def _gmpo(ratio_bT: Tensor, tokens: Tokens, grpo: GrpoConfig) -> Surrogate:
    log_bT, advantages_bT = tokens.log_ratio_bT, tokens.advantages_bT
    low_bT = (log_bT < -grpo.epsilon_low) & (advantages_bT < 0)
    high_bT = (log_bT > grpo.epsilon_high) & (advantages_bT > 0)
    clipped_bT = torch.where(low_bT | high_bT, log_bT.clamp(-grpo.epsilon_low, grpo.epsilon_high), log_bT)
    return exp(_sequence_log_ratio(clipped_bT, tokens.real_bT)) * advantages_bT, low_bT, high_bT


def _dppo_tv(ratio_bT: Tensor, tokens: Tokens, grpo: GrpoConfig) -> Surrogate:
    logp_bT = tokens.logp_bT.detach()
    moved_bT = logp_bT.exp() - (logp_bT - tokens.log_ratio_bT.detach()).exp()
    low_bT, high_bT = moved_bT < -grpo.epsilon_low, moved_bT > grpo.epsilon_high
    return _cut(ratio_bT, tokens, low_bT & (tokens.advantages_bT < 0), high_bT & (tokens.advantages_bT > 0))


def _dppo_kl(ratio_bT: Tensor, tokens: Tokens, grpo: GrpoConfig) -> Surrogate:
    log_bT, logp_bT = tokens.log_ratio_bT.detach(), tokens.logp_bT.detach()
    old_bT = logp_bT - log_bT
    rest_bT, old_rest_bT = (torch.log(-torch.expm1(x.clamp(max=_MOST_LOGP))) for x in (logp_bT, old_bT))
    kl_bT = -old_bT.exp() * log_bT + old_rest_bT.exp() * (old_rest_bT - rest_bT)
    low_bT, high_bT = (log_bT < 0) & (kl_bT > grpo.epsilon_low), (log_bT > 0) & (kl_bT > grpo.epsilon_high)
    return _cut(ratio_bT, tokens, low_bT & (tokens.advantages_bT < 0), high_bT & (tokens.advantages_bT > 0))


def _band(ratio_bT: Tensor, tokens: Tokens, grpo: GrpoConfig) -> Surrogate:
    low_bT, high_bT = ratio_bT < 1 - grpo.epsilon_low, ratio_bT > 1 + grpo.epsilon_high
    return _cut(ratio_bT, tokens, low_bT & (tokens.advantages_bT != 0), high_bT & (tokens.advantages_bT != 0))


def _cut(ratio_bT: Tensor, tokens: Tokens, low_bT: Tensor, high_bT: Tensor) -> Surrogate:
    """The ratio times the advantage, without the tokens that have moved too far."""
    return torch.where(low_bT | high_bT, 0.0, ratio_bT * tokens.advantages_bT), low_bT, high_bT


def _ratio(ratio_bT: Tensor, tokens: Tokens, grpo: GrpoConfig) -> Surrogate:
    never_bT = torch.zeros_like(ratio_bT, dtype=torch.bool)
    return ratio_bT * tokens.advantages_bT, never_bT, never_bT


SURROGATES: dict[str, Callable[[Tensor, Tokens, GrpoConfig], Surrogate]] = {
    "clip": _clip, "cispo": _cispo, "sapo": _sapo, "gmpo": _gmpo, "dppo_tv": _dppo_tv, "dppo_kl": _dppo_kl,
    "band": _band, "ratio": _ratio,
}  # fmt: skip
"""Functions of ratio r and the tokens (log-probability logp, advantage A) that return the surrogate.

`clip`: min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) (PPO eq. 7, with DAPO's separate bounds, eq. 8). With
`dual_clip` c and A < 0, it is no less than c A (arXiv:1912.09729 eq. 5), below which there is no gradient.

`cispo`: sg[min(r, 1 + epsilon_high)] A logp (MiniMax-M1 eq. 4 and 5, without the lower bound, as in its training).

`sapo`: 4 / tau sigmoid(tau (r - 1)) A, tau being tau_pos where A > 0 and else tau_neg (SAPO): a soft gate, whose slope
is 1 at r = 1 and falls to 0 on both sides.

`gmpo`: exp(mean over tokens of l) A, where l is log r clipped to [-epsilon_low, epsilon_high] on the side to which A
moves it (GMPO): the geometric mean of the clipped ratios. The gradient goes to each token as in LOG_RATIOS' `sequence`.

`dppo_tv`: r A, and 0 where A > 0 and policy - old > epsilon_high, or A < 0 and policy - old < -epsilon_low: the
probability of the sampled token against all others bounds the total variation (DPPO, binary approximation). `dppo_kl`:
the same with KL(old || policy) of these two outcomes in place of the difference, in nats.

`band`: r A, and 0 where r is outside [1 - epsilon_low, 1 + epsilon_high], whatever the sign of A (Kimi K2.5,
arXiv:2602.02276). `ratio`: r A.
"""


def surrogate(
    token_log_ratio_bT: Tensor, logp_bT: Tensor, advantages_bT: Tensor, real_bT: Tensor, grpo: GrpoConfig
) -> tuple[Tensor, Surrogate]:
    """Return the ratio of every token, [b, T], and its surrogate. The arguments must be 0 outside the mask."""
    ratio_bT = exp(LOG_RATIOS[grpo.importance](token_log_ratio_bT, real_bT))
    tokens = Tokens(token_log_ratio_bT, logp_bT, advantages_bT, real_bT)
    return ratio_bT, SURROGATES[grpo.surrogate](ratio_bT, tokens, grpo)


def off_policy_factor(log_ratio_bT: Tensor, advantages_bT: Tensor, real_bT: Tensor, limit: float) -> Tensor:
    """Return 0 for tokens of negative advantage in completions whose mean of log(old / policy) is above `limit` nats,
    else 1, [b, T] (DeepSeek-V3.2, arXiv:2512.02556, eq. 9)."""
    far_b1 = mean_over_tokens(-log_ratio_bT.detach(), real_bT) > limit
    return (~(far_b1 & (advantages_bT < 0))).to(log_ratio_bT)


def mean_over_tokens(values_bT: Tensor, real_bT: Tensor) -> Tensor:
    """Return the mean over real tokens, [b, 1], 0 for a row without any. Values must be 0 on other tokens."""
    return values_bT.sum(1, keepdim=True) / real_bT.sum(1, keepdim=True).clamp(min=1)


def exp(log_ratio: Tensor) -> Tensor:
    """Return the exponential of log-ratios within LOG_RATIO_LIMIT."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def masked(values_bT: Tensor, real_bT: Tensor) -> Tensor:
    """Set values outside the mask to 0. This must precede any arithmetic: NaN * 0 is NaN, in the gradient too."""
    return torch.where(real_bT, values_bT, 0.0)
