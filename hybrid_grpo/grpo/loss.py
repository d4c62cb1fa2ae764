"""The mathematics of the policy loss: tensors in, tensors and numbers out.

`micro_batch_loss` is the loss of one micro-batch, `policy_loss` its formula. Every choice of `GrpoConfig` is one entry
of a table: AVERAGES, KL and DRIFTS here, LOG_RATIOS and SURROGATES in surrogates.py, CORRECTIONS in correction.py.

Notation of the papers: GRPO is DeepSeekMath (arXiv:2402.03300), DAPO is arXiv:2503.14476, Dr. GRPO is
arXiv:2503.20783. Shapes are explained in data/batch.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.config.grpo import GrpoConfig, KlEstimator, LossType
from hybrid_grpo.data.batch import Numbers, TrainBatch
from hybrid_grpo.grpo.correction import sampler_correction
from hybrid_grpo.grpo.objective import Objective
from hybrid_grpo.grpo.surrogates import LOG_RATIO_LIMIT, exp, masked, off_policy_factor, surrogate


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


def micro_batch_loss(
    batch: TrainBatch, logp_bT: Tensor, entropy_bT: Tensor, grpo: GrpoConfig, beta: float,
    objective: Objective | None = None,
) -> tuple[Tensor, Numbers]:  # fmt: skip
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
        correction_bT = correction_bT / batch.correction_mean
        numbers |= correction

    advantages_bT = batch.advantages_bT
    others: dict[str, Any] = {"ref_logp_bT": batch.ref_logp_bT, "entropy_bT": entropy_bT}
    others |= {"correction_bT": correction_bT, "beta": beta}
    if batch.drifts_bT is not None:
        others["drifts_bT"] = batch.drifts_bT
    loss, stats = policy_loss(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, **others)
    if objective is not None:
        others |= {} if batch.group_b is None else {"group_b": batch.group_b}
        loss = objective(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, **others)
    numbers |= stats.numbers()
    if batch.ref_logp_bT is None:
        numbers.pop("policy/kl", None)
    entropy = masked(entropy_bT.detach(), real_bT).sum() / stats.tokens.clamp(min=1)
    numbers["policy/entropy"] = entropy, stats.tokens
    return loss, numbers


AVERAGES: dict[str, Callable[[Tensor, int, int, int], Tensor | int]] = {
    "dapo": lambda length_b1, tokens, rows, limit: tokens,
    "grpo": lambda length_b1, tokens, rows, limit: rows * length_b1.clamp(min=1),
    "dr_grpo": lambda length_b1, tokens, rows, limit: rows * limit,
}
"""Functions of the mask, all tokens, all rows and the longest completion allowed; the result divides a token's loss."""


def learns_from_advantages_alone(grpo: GrpoConfig, objective: Objective | None) -> bool:
    """Return whether tokens whose advantage is 0 add nothing to the gradient of `micro_batch_loss`."""
    has_kl = grpo.has_reference and grpo.kl_in == "loss"
    has_bonus = grpo.entropy_coef != 0 or grpo.entropy_target is not None
    return not (has_kl or has_bonus or grpo.drift_coef) and objective is None


def token_weights(
    mask_bT: Tensor, loss_type: LossType, *, total_tokens: int, total_rows: int, max_completion_tokens: int,
    length_b1: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the weight of every token's loss: the weighted sum over a minibatch on all ranks is the average loss.

    `dapo`: 1 / all tokens (DAPO eq. 8). `grpo`: 1 / (rows * tokens of the row) (DeepSeekMath eq. 3).
    `dr_grpo`: 1 / (rows * max_completion_tokens), which removes the length bias (Dr. GRPO section 3.2).

    Args:
        mask_bT: bool, True on the tokens that take part.
        total_tokens, total_rows: the numbers of tokens and rows that take part, over the whole minibatch and all ranks.
        length_b1: tokens of each row, of which the mask may have a part. Default: the mask has all.

    Returns:
        float32 [b, T], 0 where the mask is False.
    """
    mask = mask_bT.float()
    # If nothing takes part, every weight is 0, not 0 / 0.
    length_b1 = mask.sum(1, keepdim=True) if length_b1 is None else length_b1
    return mask / AVERAGES[loss_type](length_b1, max(total_tokens, 1), max(total_rows, 1), max_completion_tokens)


KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: d.exp() - d - 1,
}
"""Estimators of KL(policy || reference) from d = ref_logp - logp of sampled tokens (Schulman, "Approximating KL
divergence"; k3 is DeepSeekMath eq. 4). k2 and k3 are never negative; k1 and k3 are unbiased."""


def kl_penalty(logp: Tensor, ref_logp: Tensor, estimator: KlEstimator) -> Tensor:
    """Return the estimator of each element, in nats. A clamp keeps exp finite if policy and reference are far apart."""
    return KL[estimator]((ref_logp - logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def reward_kl(old_logp_bT: Tensor, ref_logp_bT: Tensor, mask_bT: Tensor, estimator: KlEstimator) -> Tensor:
    """Return each token's KL to the reference, [b, T], in nats, 0 outside the mask.

    `kl_in: reward` subtracts beta times this KL from the reward: summed over the completion's tokens (as in RLOO,
    arXiv:2402.14740), or, with a learned value, token by token. It is the sampling policy's KL, without gradient.
    """
    return kl_penalty(masked(old_logp_bT, mask_bT), masked(ref_logp_bT, mask_bT), estimator).detach()


_ROUNDING = 1e-5
"""Nats by which sampler and training forward of one policy may differ in float32."""


def _absolute(log_ratio: Tensor) -> Tensor:
    # The sign of a rounding would be a gradient as large as any other.
    return torch.where(log_ratio.abs() > _ROUNDING, log_ratio, 0.0).abs()


DRIFTS: dict[str, Callable[[Tensor], Tensor]] = {"square": Tensor.square, "absolute": _absolute}
"""Penalties on a token's log(policy / old): `square` of Kimi K2.5 (arXiv:2602.02276), `absolute` of KL-Cov
(arXiv:2505.22617). Both are 0, and have no gradient, where the policy is the one that sampled."""


def policy_loss(
    logp_bT: Tensor, old_logp_bT: Tensor, advantages_bT: Tensor, weight_bT: Tensor, grpo: GrpoConfig, *, beta: float,
    ref_logp_bT: Tensor | None = None, entropy_bT: Tensor | None = None, correction_bT: Tensor | None = None,
    drifts_bT: Tensor | None = None,
) -> tuple[Tensor, LossStats]:  # fmt: skip
    """Return the weighted sum of the surrogate, the KL to the reference and the entropy bonus.

    Per token (DeepSeekMath eq. 3):  -correction * surrogate + beta * KL + drift_coef * drift - entropy_coef * entropy.
    With `off_policy_mask` the surrogate is multiplied by `off_policy_factor`. With `kl_unbiased` the KL is multiplied
    by its token's exp(logp - old_logp), differentiable (DeepSeek-V3.2, eq. 7): with k1 or k3 its expected gradient is
    then the gradient of the current policy's KL, from tokens of the policy that sampled.

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
        drifts_bT: bool, the tokens that the drift is a term of; default: all.

    Returns:
        The loss, a scalar, and statistics of the real tokens (weight above 0).
    """
    real = weight_bT > 0
    logp, advantages = masked(logp_bT, real), masked(advantages_bT, real)
    token_log_ratio = logp - masked(old_logp_bT, real)
    ratio, (gain, low, high) = surrogate(token_log_ratio, logp, advantages, real, grpo)
    if grpo.off_policy_mask is not None:
        gain = gain * off_policy_factor(token_log_ratio, advantages, real, grpo.off_policy_mask)
    token_loss = -gain if correction_bT is None else -gain * masked(correction_bT, real)
    if grpo.drift_coef != 0:
        drift = DRIFTS[grpo.drift](token_log_ratio)
        token_loss = token_loss + grpo.drift_coef * (drift if drifts_bT is None else masked(drift, drifts_bT))
    kl = torch.zeros_like(token_loss)
    if ref_logp_bT is not None:
        kl = kl_penalty(logp, masked(ref_logp_bT, real), grpo.kl_estimator)
    if beta != 0 and grpo.kl_in == "loss":
        assert ref_logp_bT is not None, "a KL term needs ref_logp"
        token_loss = token_loss + beta * (kl * exp(token_log_ratio) if grpo.kl_unbiased else kl)
    if grpo.entropy_coef != 0:
        assert entropy_bT is not None, "an entropy bonus needs the entropy"
        token_loss = token_loss - grpo.entropy_coef * masked(entropy_bT, real)
    loss = (token_loss * weight_bT).sum()

    # On padding the KL and the advantage are 0, and a ratio with advantage 0 is not clipped.
    ratio = masked(ratio.detach(), real)
    return loss, LossStats(real.sum(), kl.detach().sum(), low.sum(), high.sum(), ratio.sum(), ratio.max())
