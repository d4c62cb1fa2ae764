"""A*-PO (arXiv:2505.20686): the policy's log-ratio to the reference is fitted to the advantage under the best policy.

    --grpo.objective training_scripts/objectives/a2po.py:a2po --grpo.whole_groups true
    --grpo.loss_type grpo --grpo.scale_rewards none --grpo.beta 0.05

For each completion, (r - V - beta sum log(policy / reference))^2 with V = BETA_1 log mean exp(r / BETA_1). The paper
takes this mean over samples of the reference, before training; here it is over the group, whose completions are the
reference's as long as the policy is.
"""

import torch

BETA_1 = 0.5


def a2po(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, *, beta, ref_logp_bT, group_b, **others):
    real_bT, weight_b = weight_bT > 0, weight_bT.sum(1)
    counts_b = weight_b > 0
    same_bb = (group_b[:, None] == group_b) & counts_b
    # With loss_type grpo the weights of a completion's tokens add up to 1 / completions.
    advantage_b = torch.where(real_bT, weight_bT * advantages_bT, 0.0).sum(1) / weight_b.clamp(min=1e-30)
    # V minus the group's mean reward, which the advantages lack.
    size_b = same_bb.to(weight_bT.dtype).sum(1).clamp(min=1)
    value_b = BETA_1 * (torch.where(same_bb, advantage_b / BETA_1, -1e30).logsumexp(1) - size_b.log())
    log_ratio_bT = torch.where(real_bT, logp_bT, 0.0) - torch.where(real_bT, ref_logp_bT, 0.0)
    left_b = torch.where(counts_b, advantage_b - value_b, 0.0) - beta * log_ratio_bT.sum(1)
    return (weight_b * left_b.square()).sum()
