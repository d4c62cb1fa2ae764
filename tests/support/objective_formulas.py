"""The objectives as their papers write them, in numpy and float64: slow, and without autograd."""

from dataclasses import dataclass, field

import numpy as np
import torch

from hybrid_grpo.config import GrpoConfig
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


@dataclass
class Row:
    """One completion without padding; `held` is logp where a formula stops the gradient."""

    logp: np.ndarray
    held: np.ndarray
    old: np.ndarray
    ref: np.ndarray
    advantages: np.ndarray
    entropy: np.ndarray
    correction: np.ndarray = field(default_factory=lambda: np.ones(1))

    def ratios(self, grpo: GrpoConfig, logp: np.ndarray) -> np.ndarray:
        """PPO's r_t; or the ratio of the whole completion, GSPO eq. 7, in every place."""
        token = np.exp(logp - self.old)
        return token if grpo.importance == "token" else np.full_like(token, np.prod(token) ** (1 / len(token)))

    def surrogate(self, grpo: GrpoConfig) -> np.ndarray:
        """PPO eq. 7 with DAPO's bounds, and GSPO eq. 5; Ye et al. eq. 5; MiniMax-M1 eq. 4 and 5."""
        a = self.advantages
        if grpo.surrogate == "cispo":
            return np.minimum(self.ratios(grpo, self.held), 1 + grpo.epsilon_high) * a * self.logp
        r = self.ratios(grpo, self.logp)
        if grpo.importance == "sequence" and np.ptp(a) > 0:
            # GSPO-token: advantages of tokens, sg[s] policy_t / sg[policy_t].
            r = self.ratios(grpo, self.held) * np.exp(self.logp - self.held)
        gain = np.minimum(r * a, np.clip(r, 1 - grpo.epsilon_low, 1 + grpo.epsilon_high) * a)
        if grpo.dual_clip is not None:
            gain = np.where(a < 0, np.maximum(gain, grpo.dual_clip * a), gain)
        return gain

    def kl(self, grpo: GrpoConfig) -> np.ndarray:
        ratio = np.exp(self.ref - self.logp)
        estimate = {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - np.log(ratio) - 1}
        unbiased = np.exp(self.logp - self.old) if grpo.kl_unbiased else 1.0
        return unbiased * estimate[grpo.kl_estimator]

    def loss(self, grpo: GrpoConfig, beta: float) -> np.ndarray:
        beta = beta if grpo.kl_in == "loss" else 0.0
        policy = self.correction * self.surrogate(grpo)
        return -policy + beta * self.kl(grpo) - grpo.entropy_coef * self.entropy


def value(
    batch: Batch, grpo: GrpoConfig, beta: float, logp: np.ndarray | None = None, corrected: bool = False
) -> float:
    """The whole objective: DAPO eq. 8, DeepSeekMath eq. 3 or Dr. GRPO, of the token losses."""
    logp = batch.logp.numpy() if logp is None else logp
    rows = []
    for b, mask in enumerate(batch.mask.numpy()):
        names = ("old", "ref", "advantages", "entropy", *(["correction"] if corrected else []))
        fields = {name: getattr(batch, name)[b].numpy()[mask] for name in names}
        rows.append(Row(logp[b][mask], batch.logp[b].numpy()[mask], **fields).loss(grpo, beta))
    return {
        "dapo": lambda: np.concatenate(rows).mean(),
        "grpo": lambda: np.mean([row.mean() for row in rows]),
        "dr_grpo": lambda: np.sum([row.sum() for row in rows]) / (len(rows) * LIMIT),
    }[grpo.loss_type]()


def slopes(batch: Batch, grpo: GrpoConfig, beta: float, corrected: bool = False, step: float = 1e-5) -> np.ndarray:
    """d value / d logp by central differences, 0 on padding."""
    gradient = np.zeros(batch.logp.shape)
    for b, t in batch.mask.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            logp = batch.logp.numpy().copy()
            logp[b, t] += sign * step
            ends.append(value(batch, grpo, beta, logp, corrected))
        gradient[b, t] = (ends[0] - ends[1]) / (2 * step)
    return gradient
