"""The mathematics of on-policy distillation: a teacher's word on the tokens that the policy has sampled.

The policy is to come near the teacher in the reverse KL divergence, KL(policy || teacher) of the next token, at the
prefixes that it samples itself (GKD, arXiv:2306.13649, section 3, with this divergence). As there, no gradient goes
through the sampling of prefixes: a token answers for its own divergence only, where MiniLLM (arXiv:2306.08543) credits
it with those behind it. The gradient at a prefix is sum_v p_v (log p_v - log q_v) grad log p_v, with the policy p and
the teacher q, which is

- the expectation of (log p_v - log q_v) grad log p_v over tokens v that are drawn from p: an advantage of -(log p_v -
  log q_v) for the token that was sampled, constant, and of no other token ("On-Policy Distillation", Thinking Machines
  Lab, 2025);
- or that of the divergence itself, which the head computes over the vocabulary (divergence.py).
"""

import torch
from torch import Tensor

from hybrid_grpo.data.batch import Numbers


def measure_teacher(old_logp_BT: Tensor, teacher_logp_BT: Tensor, mask_BT: Tensor) -> Numbers:
    """The teacher's mean log-probability of the sampled tokens, and the mean of the policy's minus the teacher's: an
    unbiased estimate of the KL divergence to the teacher of the policy that sampled."""
    tokens = mask_BT.sum()
    teacher, policy = (torch.where(mask_BT, logp_BT, 0.0).sum() / tokens for logp_BT in (teacher_logp_BT, old_logp_BT))
    return {"teacher/logp": (teacher, tokens), "teacher/kl": (policy - teacher, tokens)}


def teacher_advantages(old_logp_BT: Tensor, teacher_logp_BT: Tensor, coef: float) -> Tensor:
    """-coef (old_logp - teacher_logp), [B, T], what a token's advantage changes by; see the module.

    Args:
        old_logp_BT: of the policy that sampled.
        teacher_logp_BT: of the teacher.
        coef: advantage that a nat costs.
    """
    return -coef * (old_logp_BT - teacher_logp_BT)


def teacher_loss(kl_bT: Tensor, weight_bT: Tensor, coef: float) -> Tensor:
    """coef times the weighted sum of the divergences of a micro-batch, a scalar.

    Args:
        kl_bT: carries the gradient.
        weight_bT: see `token_weights`; the caller chose the denominator.
        coef: weight beside the loss of the policy.
    """
    return coef * (kl_bT * weight_bT).sum()
