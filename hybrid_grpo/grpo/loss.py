"""The mathematics of the policy loss: tensors in, tensors and numbers out.

`micro_batch_loss` is the loss of one micro-batch, `policy_loss` its formula. Every choice of `GrpoConfig` is one entry
of a table: AVERAGES, LOG_RATIOS, SURROGATES, KL, CORRECTIONS.

Notation of the papers: GRPO is DeepSeekMath (arXiv:2402.03300), DAPO is arXiv:2503.14476, Dr. GRPO is
arXiv:2503.20783, GSPO is arXiv:2507.18071, CISPO is MiniMax-M1 (arXiv:2506.13585), PPO is arXiv:1707.06347. Shapes are
explained in data/batch.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.data.batch import Numbers, TrainBatch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this, to keep exp from overflowing; such a ratio is far outside any clip range anyway."""


@dataclass(frozen=True)
class LossStats:
    """Sums over real tokens, except for `ratio_max`, a maximum."""

    tokens: Tensor
    kl: Tensor
    """Sum of the chosen KL estimator; 0 without a reference."""
    clipped_low: Tensor
    clipped_high: Tensor
    ratio: Tensor
    ratio_max: Tensor

    def numbers(self) -> Numbers:
        """The statistics as they are logged, with their weights: the tokens."""
        divisor = self.tokens.clamp(min=1)
        return {
            "policy/clip_frac_low": (self.clipped_low / divisor, self.tokens),
            "policy/clip_frac_high": (self.clipped_high / divisor, self.tokens),
            "policy/ratio_max": (self.ratio_max, self.tokens.clamp(max=1)),
            "policy/kl": (self.kl / divisor, self.tokens),
        }


@dataclass(frozen=True)
class CorrectionStats:
    """Scalars that show how far the sampler is from the training forward, over real tokens."""

    tokens: Tensor
    mean: Tensor
    """Mean ratio before truncation: of single tokens for `truncate`, of whole completions for `mask`."""
    max: Tensor
    fraction: Tensor
    """Share of tokens whose weight was truncated, or whose completion was dropped."""

    def numbers(self) -> Numbers:
        """The statistics as they are logged, with their weights: the tokens."""
        return {
            "parity/ratio_mean": (self.mean, self.tokens),
            "parity/ratio_max": (self.max, self.tokens.clamp(max=1)),
            "parity/corrected_frac": (self.fraction, self.tokens),
        }


Objective = Callable[..., Tensor]
"""The user's own loss, `grpo.objective`: called with the arguments of `policy_loss`, it returns the scalar loss."""


def micro_batch_loss(
    batch: TrainBatch,
    logp_bT: Tensor,
    entropy_bT: Tensor,
    grpo: GrpoConfig,
    beta: float,
    objective: Objective | None = None,
) -> tuple[Tensor, Numbers]:
    """Return this micro-batch's share of the loss of its optimizer step, and its metrics.

    In the first optimizer step on a rollout, the policy is still the one that sampled, so its ratio is 1 by
    construction; recorded log-probabilities would only add rounding errors (the batch's `old_logp_bT` is None then).
    Tokens of earlier steps, which an older policy sampled, always have their recorded log-probabilities.

    Tokens that the policy did not write are left out, since the KL, the entropy, the sampler's correction and all
    `policy/` statistics are expectations under the policy.

    Args:
        logp_bT, entropy_bT: float32, of the current policy; they carry the gradient.
        beta: current coefficient of the KL.
        objective: the user's own loss, which replaces the one from `policy_loss`; the statistics stay the same.
    """
    old_logp_bT = logp_bT.detach() if batch.old_logp_bT is None else batch.old_logp_bT
    if batch.is_old_bT is not None:
        old_logp_bT = torch.where(batch.is_old_bT, batch.sampler_logp_bT, old_logp_bT)
    weight_bT = torch.where(batch.own_bT, batch.weight_bT, 0.0) if batch.writers else batch.weight_bT
    real_bT = weight_bT > 0
    correction_bT: Tensor | None = None
    numbers: Numbers = {}
    if grpo.sampler_correction != "none":
        correction_bT, correction = sampler_correction(old_logp_bT, batch.sampler_logp_bT, real_bT, grpo)
        numbers |= correction.numbers()

    tensors = logp_bT, old_logp_bT, batch.advantages_bT, weight_bT
    others: dict[str, Any] = {"ref_logp_bT": batch.ref_logp_bT, "entropy_bT": entropy_bT}
    others |= {"correction_bT": correction_bT, "beta": beta}
    loss, stats = policy_loss(*tensors, grpo, **others)
    if objective is not None:
        loss = objective(*tensors, grpo, **others)
    numbers |= stats.numbers()
    if batch.ref_logp_bT is None:
        numbers.pop("policy/kl", None)
    entropy = _real(entropy_bT.detach(), real_bT).sum() / stats.tokens.clamp(min=1)
    numbers["policy/entropy"] = entropy, stats.tokens
    return loss, numbers


AVERAGES: dict[str, Callable[[Tensor, int, int, int], Tensor | int]] = {
    "dapo": lambda mask_bT, tokens, rows, limit: tokens,
    "grpo": lambda mask_bT, tokens, rows, limit: rows * mask_bT.sum(1, keepdim=True).clamp(min=1),
    "dr_grpo": lambda mask_bT, tokens, rows, limit: rows * limit,
}
"""Functions of the mask, all tokens, all rows and the longest completion allowed; the result divides a token's loss."""


def learns_from_advantages_alone(grpo: GrpoConfig, objective: Objective | None) -> bool:
    """Return whether tokens whose advantage is 0 add nothing to the gradient of `micro_batch_loss`."""
    has_kl = grpo.beta != 0 and grpo.kl_in == "loss"
    return not has_kl and grpo.entropy_coef == 0 and objective is None


def token_weights(
    mask_bT: Tensor,
    loss_type: Literal["dapo", "grpo", "dr_grpo"],
    *,
    total_tokens: int,
    total_rows: int,
    max_completion_tokens: int,
) -> Tensor:
    """Return the weight of every token's loss: the weighted sum over a minibatch on all ranks is the average loss.

    `dapo`: 1 / all tokens (DAPO eq. 8). `grpo`: 1 / (rows * tokens of the row) (DeepSeekMath eq. 3).
    `dr_grpo`: 1 / (rows * max_completion_tokens), which removes the length bias (Dr. GRPO section 3.2).

    Args:
        mask_bT: bool, True on the tokens that take part.
        total_tokens, total_rows: the numbers of tokens and rows that take part, over the whole minibatch and all ranks.

    Returns:
        float32 [b, T], 0 where the mask is False.
    """
    mask = mask_bT.float()
    # If nothing takes part, every weight is 0, not 0 / 0.
    return mask / AVERAGES[loss_type](mask, max(total_tokens, 1), max(total_rows, 1), max_completion_tokens)


def _sequence_log_ratio(log_ratio_bT: Tensor, real_bT: Tensor) -> Tensor:
    mean_b1 = _mean_over_tokens(log_ratio_bT.detach(), real_bT)
    return mean_b1 + (log_ratio_bT - log_ratio_bT.detach())


LOG_RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratio_bT, real_bT: log_ratio_bT,
    "sequence": _sequence_log_ratio,
}
"""Functions of the tokens' log-ratios and the mask of real tokens that return the log-ratios for the loss, [b, T].

`sequence` has, at every token, the value of GSPO's s = exp(mean over tokens of log(policy / old)) (GSPO eq. 7), and
passes the gradient to that token alone (GSPO-token: s_t = sg[s] policy_t / sg[policy_t]). If a row's tokens share
weight and advantage, this is the gradient of GSPO's own objective (eq. 5): each of its n tokens contributes 1 / n to s.
"""


Surrogate = tuple[Tensor, Tensor, Tensor]
"""The objective of each token, which is maximized, and where (bool) its ratio is clipped from below and from above."""


def _clip(ratio_bT: Tensor, logp_bT: Tensor, advantages_bT: Tensor, grpo: GrpoConfig) -> Surrogate:
    low, high = 1 - grpo.epsilon_low, 1 + grpo.epsilon_high
    gain_bT = torch.minimum(ratio_bT * advantages_bT, ratio_bT.clamp(low, high) * advantages_bT)
    if grpo.dual_clip is not None:
        bounded_bT = torch.maximum(gain_bT, grpo.dual_clip * advantages_bT)
        gain_bT = torch.where(advantages_bT < 0, bounded_bT, gain_bT)
    return gain_bT, (ratio_bT < low) & (advantages_bT < 0), (ratio_bT > high) & (advantages_bT > 0)


def _cispo(ratio_bT: Tensor, logp_bT: Tensor, advantages_bT: Tensor, grpo: GrpoConfig) -> Surrogate:
    high = 1 + grpo.epsilon_high
    gain_bT = ratio_bT.detach().clamp(max=high) * advantages_bT * logp_bT
    return gain_bT, torch.zeros_like(gain_bT, dtype=torch.bool), (ratio_bT > high) & (advantages_bT != 0)


SURROGATES: dict[str, Callable[[Tensor, Tensor, Tensor, GrpoConfig], Surrogate]] = {"clip": _clip, "cispo": _cispo}
"""Functions of ratio r, log-probability logp and advantage A that return the surrogate.

`clip`: min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) (PPO eq. 7, with DAPO's separate bounds, eq. 8). With
`dual_clip` c and A < 0, it is no less than c A (arXiv:1912.09729 eq. 5), below which there is no gradient.

`cispo`: sg[min(r, 1 + epsilon_high)] A logp (MiniMax-M1 eq. 4 and 5, without the lower bound, as in its training).
"""


def surrogate(
    token_log_ratio_bT: Tensor, logp_bT: Tensor, advantages_bT: Tensor, real_bT: Tensor, grpo: GrpoConfig
) -> tuple[Tensor, Surrogate]:
    """Return the ratio of every token, [b, T], and its surrogate. The arguments must be 0 outside the mask."""
    ratio_bT = _exp(LOG_RATIOS[grpo.importance](token_log_ratio_bT, real_bT))
    return ratio_bT, SURROGATES[grpo.surrogate](ratio_bT, logp_bT, advantages_bT, grpo)


KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - d - 1,
}
"""Estimators of KL(policy || reference) from d = ref_logp - logp of sampled tokens (Schulman, "Approximating KL
divergence"; k3 is DeepSeekMath eq. 4). k2 and k3 are never negative; k1 and k3 are unbiased."""


def kl_penalty(logp: Tensor, ref_logp: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return the estimator of each element, in nats. A clamp keeps exp finite if policy and reference are far apart."""
    return KL[estimator]((ref_logp - logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def reward_kl(
    old_logp_bT: Tensor, ref_logp_bT: Tensor, mask_bT: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Return each token's KL to the reference, [b, T], in nats, 0 outside the mask.

    `kl_in: reward` subtracts beta times this KL from the reward: summed over the completion's tokens (as in RLOO,
    arXiv:2402.14740), or, with a learned value, token by token. It is the sampling policy's KL, without gradient.
    """
    return kl_penalty(_real(old_logp_bT, mask_bT), _real(ref_logp_bT, mask_bT), estimator).detach()


def _truncate(log_ratio_bT: Tensor, real_bT: Tensor, grpo: GrpoConfig) -> tuple[Tensor, Tensor, Tensor]:
    ratio_bT = _exp(log_ratio_bT)
    return ratio_bT, ratio_bT.clamp(max=grpo.sampler_ratio_max), ratio_bT > grpo.sampler_ratio_max


def _mask(log_ratio_bT: Tensor, real_bT: Tensor, grpo: GrpoConfig) -> tuple[Tensor, Tensor, Tensor]:
    ratio_bT = _exp(_mean_over_tokens(log_ratio_bT, real_bT)).expand_as(log_ratio_bT)
    dropped_bT = (ratio_bT < 1 / grpo.sampler_ratio_max) | (ratio_bT > grpo.sampler_ratio_max)
    return ratio_bT, (~dropped_bT).to(ratio_bT), dropped_bT


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, GrpoConfig], tuple[Tensor, Tensor, Tensor]]] = {
    "none": lambda log_bT, real_bT, _: (_exp(log_bT), torch.ones_like(log_bT), torch.zeros_like(real_bT)),
    "truncate": _truncate,
    "mask": _mask,
}
"""Functions of the tokens' log(old / sampler) that return the ratio, the loss's factor, and where (bool) it was cut."""


def sampler_correction(
    old_logp_bT: Tensor, sampler_logp_bT: Tensor, mask_bT: Tensor, grpo: GrpoConfig
) -> tuple[Tensor, CorrectionStats]:
    """Return factors for the policy loss that correct for the difference between the sampler and the training forward.

    `truncate`: min(old / sampler, sampler_ratio_max) of every token (truncated importance sampling, Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"). `mask`: 0 for completions whose
    exp(mean over tokens of log(old / sampler)) is outside [1 / sampler_ratio_max, sampler_ratio_max], else 1.

    `old_logp_bT` comes from the training forward with the weights that sampled. The factors are [b, T], without
    gradient, and 0 on padding; statistics of the ratios are returned too.
    """
    log_ratio_bT = (_real(old_logp_bT, mask_bT) - _real(sampler_logp_bT, mask_bT)).detach()
    ratio_bT, factor_bT, cut_bT = CORRECTIONS[grpo.sampler_correction](log_ratio_bT, mask_bT, grpo)
    tokens = mask_bT.sum()
    stats = CorrectionStats(
        tokens=tokens,
        mean=_real(ratio_bT, mask_bT).sum() / tokens.clamp(min=1),
        max=_real(ratio_bT, mask_bT).max(),
        fraction=(cut_bT & mask_bT).sum() / tokens.clamp(min=1),
    )
    return _real(factor_bT, mask_bT), stats


def policy_loss(
    logp_bT: Tensor,
    old_logp_bT: Tensor,
    advantages_bT: Tensor,
    weight_bT: Tensor,
    grpo: GrpoConfig,
    *,
    beta: float,
    ref_logp_bT: Tensor | None = None,
    entropy_bT: Tensor | None = None,
    correction_bT: Tensor | None = None,
) -> tuple[Tensor, LossStats]:
    """Return the weighted sum of the surrogate, the KL to the reference and the entropy bonus.

    Per token (DeepSeekMath eq. 3):  -correction * surrogate + beta * KL - entropy_coef * entropy.  With `kl_unbiased`
    the KL is multiplied by its token's exp(logp - old_logp), differentiable (DeepSeek-V3.2, eq. 7): with k1 or k3 its
    expected gradient is then the gradient of the current policy's KL, from tokens of the policy that sampled.

    Args:
        logp_bT: float32, of the current policy; carries the gradient.
        old_logp_bT: float32, of the policy that sampled.
        advantages_bT: float32; the same on all tokens of a row if only outcomes are rewarded.
        weight_bT: float32, 0 on padding; includes the denominator, see `token_weights`. Where it is 0, the values of
            the other tensors, even NaN, have no effect.
        beta: coefficient of the KL; used only with `kl_in` loss.
        ref_logp_bT: float32, of the reference; required for a KL in the loss. If it is given, the KL is measured.
        entropy_bT: float32, differentiable; required if entropy_coef is not 0.
        correction_bT: float32, see `sampler_correction`; default: 1.

    Returns:
        The loss, a scalar, and statistics of the real tokens (weight above 0).
    """
    real = weight_bT > 0
    logp, advantages = _real(logp_bT, real), _real(advantages_bT, real)
    token_log_ratio = logp - _real(old_logp_bT, real)
    ratio, (gain, low, high) = surrogate(token_log_ratio, logp, advantages, real, grpo)
    token_loss = -gain if correction_bT is None else -gain * _real(correction_bT, real)
    kl = torch.zeros_like(token_loss)
    if ref_logp_bT is not None:
        kl = kl_penalty(logp, _real(ref_logp_bT, real), grpo.kl_estimator)
    if beta != 0 and grpo.kl_in == "loss":
        assert ref_logp_bT is not None, "a KL term needs ref_logp"
        token_loss = token_loss + beta * (kl * _exp(token_log_ratio) if grpo.kl_unbiased else kl)
    if grpo.entropy_coef != 0:
        assert entropy_bT is not None, "an entropy bonus needs the entropy"
        token_loss = token_loss - grpo.entropy_coef * _real(entropy_bT, real)
    loss = (token_loss * weight_bT).sum()

    with torch.no_grad():
        # On padding the KL and the advantage are 0, and a ratio with advantage 0 is not clipped.
        stats = LossStats(
            tokens=real.sum(),
            kl=kl.sum(),
            clipped_low=low.sum(),
            clipped_high=high.sum(),
            ratio=torch.where(real, ratio, 0.0).sum(),
            ratio_max=_real(ratio, real).max(),
        )
    return loss, stats


def _real(values_bT: Tensor, real_bT: Tensor) -> Tensor:
    """Set values outside the mask to 0. This must precede any arithmetic: NaN * 0 is NaN, in the gradient too."""
    return torch.where(real_bT, values_bT, 0.0)


def _mean_over_tokens(values_bT: Tensor, real_bT: Tensor) -> Tensor:
    """Return the mean over real tokens, [b, 1], 0 for a row without any. Values must be 0 on other tokens."""
    return values_bT.sum(1, keepdim=True) / real_bT.sum(1, keepdim=True).clamp(min=1)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
