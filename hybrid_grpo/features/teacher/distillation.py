"""The mathematics of on-policy distillation.

The policy learns to minimize a divergence of the next token from the teacher's, such as the reverse KL divergence
KL(policy || teacher), at prefixes that it samples itself (GKD, arXiv:2306.13649, section 3). As in GKD, no gradient
flows through the sampling of prefixes: a token is only responsible for its own divergence, whereas in MiniLLM
(arXiv:2306.08543) it is also responsible for the divergences at later tokens. With policy p and teacher q, the gradient
of the reverse KL divergence at a prefix is sum_v p_v (log p_v - log q_v) grad log p_v. There are two ways to compute
it:

- as the expectation of (log p_v - log q_v) grad log p_v over tokens v drawn from p: a constant advantage of -(log p_v -
  log q_v) for the sampled token ("On-Policy Distillation", Thinking Machines Lab, 2025);
- as the gradient of the divergence itself, which the head computes over the vocabulary (divergence.py), and which may
  be another divergence.
"""

import torch
from torch import Tensor

from hybrid_grpo.data.batch import Numbers


def measure_teacher(old_logp_BT: Tensor, teacher_logp_BT: Tensor, mask_BT: Tensor) -> Numbers:
    """Return the teacher's mean log-probability of the sampled tokens, and the mean of `old_logp` minus the teacher's.
    The latter is an unbiased estimate of KL(policy || teacher) for the policy that sampled."""
    tokens = mask_BT.sum()
    teacher, policy = (torch.where(mask_BT, logp_BT, 0.0).sum() / tokens for logp_BT in (teacher_logp_BT, old_logp_BT))
    return {"teacher/logp": (teacher, tokens), "teacher/kl": (policy - teacher, tokens)}


def teacher_advantages(old_logp_BT: Tensor, teacher_logp_BT: Tensor, coef: float, clamp: float | None = None) -> Tensor:
    """Return -coef (old_logp - teacher_logp), [B, T], a term of the advantages; see the module's docstring. `clamp` is
    the limit of the absolute difference, in nats."""
    gap_BT = old_logp_BT - teacher_logp_BT
    return -coef * (gap_BT if clamp is None else gap_BT.clamp(-clamp, clamp))


def teacher_loss(value_bT: Tensor, weight_bT: Tensor, coef: float, clamp: float | None = None) -> Tensor:
    """Return `coef` times the weighted sum of the divergences in a micro-batch, a scalar.

    Args:
        value_bT: the divergence at each token, with gradient.
        weight_bT: see `token_weights`; the caller chose the denominator.
        coef: the weight of this loss, relative to the loss of the policy.
        clamp: limit of the divergence of a token, in nats. Tokens above it have no gradient.
    """
    return coef * ((value_bT if clamp is None else value_bT.clamp(max=clamp)) * weight_bT).sum()
