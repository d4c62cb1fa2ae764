"""TPO (arXiv:2604.06159): the policy is fitted to a target distribution over each group's completions.

    --grpo.objective training_scripts/objectives/tpo.py:tpo --grpo.whole_groups true
    --grpo.loss_type grpo --grpo.num_iterations 2

With p, a group's probabilities divided by their sum (equation 1), the target is q = p_old exp(u / eta), divided by its
sum (equation 2), and the loss is the cross-entropy of p with q, averaged over groups (equation 3): its gradient, p - q,
ends when the target is reached. u are the rewards whitened within the group. Sums of log-probabilities make p all but
certain for long completions: PER_TOKEN takes their means instead.
"""

import torch

ETA, PER_TOKEN = 1.0, False


def tpo(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, *, group_b, **others):
    real_bT, weight_b = weight_bT > 0, weight_bT.sum(1)
    counts_b = weight_b > 0
    same_bb = (group_b[:, None] == group_b) & counts_b

    def of_rows(values_bT):
        # Float32 would round these large sums by up to as much as p and q differ.
        sum_b = torch.where(real_bT, values_bT, 0.0).sum(1, dtype=torch.float64)
        return sum_b / real_bT.sum(1).clamp(min=1) if PER_TOKEN else sum_b

    def log_share(score_b):
        total_b = torch.where(same_bb, score_b, -1e30).logsumexp(1)
        return torch.where(counts_b, score_b - total_b, 0.0).to(logp_bT.dtype)

    # With loss_type grpo the weights of a completion's tokens add up to 1 / completions.
    advantage_b = torch.where(real_bT, weight_bT * advantages_bT, 0.0).sum(1) / weight_b.clamp(min=1e-30)
    # The advantages are divided by the unbiased deviation, u by that of the group.
    size_b = same_bb.to(weight_bT.dtype).sum(1)
    u_b = advantage_b * (size_b / (size_b - 1).clamp(min=1)).sqrt()
    target_b = log_share(of_rows(old_logp_bT) + u_b / ETA).exp()
    of_group_b = torch.where(same_bb, weight_b, 0.0).sum(1)
    return -(torch.where(counts_b, of_group_b * target_b, 0.0) * log_share(of_rows(logp_bT))).sum()
