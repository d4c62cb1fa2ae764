"""The objectives as their papers write them, in float64."""

import torch

from hybrid_grpo.grpo.loss import policy_loss, token_weights

LIMIT = 13


class Batch:
    """Ragged random rows in float64, with ratios well on both sides of both bounds."""

    def __init__(self, seed=0, rows=9, tokens=LIMIT, process=False):
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
        lengths[0] = tokens
        self.mask = torch.arange(tokens) < lengths[:, None]
        self.old = -randn(rows, tokens).abs()
        # A part of the row and one of the token, so that the ratios of sequences leave their bounds too.
        self.logp = self.old + 0.4 * randn(rows, 1) + 0.4 * randn(rows, tokens)
        self.ref = self.logp + 0.7 * randn(rows, tokens)
        self.advantages = (randn(rows, tokens) if process else randn(rows, 1)).expand(rows, tokens).clone()
        self.advantages[-1] = 0.0
        self.entropy = randn(rows, tokens).abs()
        self.correction = randn(rows, tokens).abs()

    def weights(self, loss_type):
        return token_weights(
            self.mask,
            loss_type,
            total_tokens=int(self.mask.sum()),
            total_rows=len(self.mask),
            max_completion_tokens=LIMIT,
        ).double()

    def loss(self, grpo, beta=0.05, rows=slice(None), logp=None, **given):
        """Loss and statistics of some rows, at the weights of the whole batch."""
        given = {"ref_logp_bT": self.ref[rows], "entropy_bT": self.entropy[rows]} | given
        logp = self.logp if logp is None else logp
        weights = self.weights(grpo.loss_type)[rows]
        return policy_loss(logp[rows], self.old[rows], self.advantages[rows], weights, grpo, beta=beta, **given)

    def gradient(self, *args, **options):
        logp = self.logp.clone().requires_grad_()
        loss, _ = self.loss(*args, logp=logp, **options)
        return torch.autograd.grad(loss, logp)[0]


def token_losses(grpo, beta, logp, old, ref, a, entropy, correction=1.0):
    """The losses of a completion's tokens, without padding: PPO eq. 7 with DAPO's bounds, and GSPO eq. 5 or, with
    advantages of tokens, GSPO-token; Ye et al. eq. 5; MiniMax-M1 eq. 4 and 5; DeepSeekMath eq. 4."""
    r = torch.exp(logp - old)
    if grpo.importance == "sequence":
        s = r.prod() ** (1 / len(r))
        r = s.detach() * torch.exp(logp - logp.detach()) if (a != a[0]).any() else s.expand_as(r)
    if grpo.surrogate == "cispo":
        gain = r.detach().clamp(max=1 + grpo.epsilon_high) * a * logp
    else:
        gain = torch.minimum(r * a, r.clamp(1 - grpo.epsilon_low, 1 + grpo.epsilon_high) * a)
    if grpo.dual_clip is not None:
        gain = torch.where(a < 0, torch.maximum(gain, grpo.dual_clip * a), gain)
    q = torch.exp(ref - logp)
    kl = {"k1": -q.log(), "k2": q.log() ** 2 / 2, "k3": q - q.log() - 1}[grpo.kl_estimator]
    kl = kl * torch.exp(logp - old) if grpo.kl_unbiased else kl
    return -correction * gain + beta * kl - grpo.entropy_coef * entropy


def by_paper(batch, grpo, beta, corrected=False):
    """The objective and its gradient: token losses averaged as in DAPO eq. 8, DeepSeekMath eq. 3 or Dr. GRPO."""
    leaf, rows = batch.logp.clone().requires_grad_(), []
    for b, mask in enumerate(batch.mask):
        fields = (leaf, batch.old, batch.ref, batch.advantages, batch.entropy)
        correction = batch.correction[b][mask] if corrected else 1.0
        rows.append(token_losses(grpo, beta, *(x[b][mask] for x in fields), correction))
    loss = {
        "dapo": lambda: torch.cat(rows).mean(),
        "grpo": lambda: torch.stack([row.mean() for row in rows]).mean(),
        "dr_grpo": lambda: torch.cat(rows).sum() / (len(rows) * LIMIT),
    }[grpo.loss_type]()
    return loss.item(), torch.autograd.grad(loss, leaf)[0]
