"""DRO (arXiv:2405.19107): the policy's log-ratio to the reference is fitted to the advantage of the whole completion.

    --grpo.objective training_scripts/objectives/dro.py:dro
    --grpo.loss_type grpo --grpo.scale_rewards none --grpo.beta 0.05

For each completion, (A - beta sum log(policy / reference))^2 / 2, where the paper's learned value is the group's mean
reward. `a2po.py` has another value.
"""

import torch


def dro(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, *, beta, ref_logp_bT, **others):
    real_bT = weight_bT > 0
    log_ratio_bT = torch.where(real_bT, logp_bT, 0.0) - torch.where(real_bT, ref_logp_bT, 0.0)
    # With loss_type grpo the weights of a completion's tokens add up to 1 / completions.
    advantage_b = torch.where(real_bT, weight_bT * advantages_bT, 0.0).sum(1) / weight_bT.sum(1).clamp(min=1e-30)
    return (weight_bT.sum(1) * (advantage_b - beta * log_ratio_bT.sum(1)).square()).sum() / 2
