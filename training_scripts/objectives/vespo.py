"""VESPO (arXiv:2602.10693): a smooth weight of the whole completion's ratio in place of clipping.

    --grpo.objective training_scripts/objectives/vespo.py:vespo --grpo.num_minibatches 4

With w, the ratio of the completion's probabilities, each token's weight is w^k exp(lambda (1 - w)), which is 1 at w = 1
and falls to 0 on both sides; k and lambda depend on the sign of the advantage.
"""

import torch

K_POS, LAMBDA_POS, K_NEG, LAMBDA_NEG = 2.0, 3.0, 3.0, 2.0


def vespo(logp_bT, old_logp_bT, advantages_bT, weight_bT, grpo, **others):
    real_bT = weight_bT > 0
    logp_bT, old_logp_bT = (torch.where(real_bT, x, 0.0) for x in (logp_bT, old_logp_bT))
    advantages_bT = torch.where(real_bT, advantages_bT, 0.0)
    log_w_b1 = (logp_bT - old_logp_bT).detach().sum(1, keepdim=True).clamp(-20, 20)
    positive_bT = advantages_bT >= 0
    k_bT = torch.full_like(logp_bT, K_NEG).masked_fill(positive_bT, K_POS)
    lambda_bT = torch.full_like(logp_bT, LAMBDA_NEG).masked_fill(positive_bT, LAMBDA_POS)
    factor_bT = torch.exp(k_bT * log_w_b1 + lambda_bT * (1 - log_w_b1.exp()))
    return -(weight_bT * factor_bT * advantages_bT * logp_bT).sum()
