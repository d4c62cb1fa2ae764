"""A teacher's distributions of the next token, and divergences between them and the policy's.

The head of `LogprobModel` calls `head_divergence` or `most_likely` in addition to computing log-probabilities. Both
compute a few rows of logits at a time. teacher.py explains what the divergence is for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_grpo.features.teacher.settings import DivergenceName
from hybrid_grpo.model.logprobs import GPU_TILE_BYTES, TILE_BYTES, LogitShape, add_product, logits_of, slices
from hybrid_grpo.model.upload import upload


@dataclass(frozen=True)
class NextTokens:
    """Distributions of the next token at N positions, at the sampling temperature."""

    logp_NK: Tensor
    """float32, log-probabilities of all tokens. With `token_NK`: [N, K + 1], the log-probabilities of its tokens, and
    of all other tokens together."""
    token_NK: Tensor | None
    """int32, the tokens that have their own log-probability; None if all tokens do."""
    vocabulary: int
    """Number of tokens in the distributions, which are the first tokens of the model's vocabulary."""

    def split(self, lengths: list[int]) -> list[NextTokens]:
        tokens = [None] * len(lengths) if self.token_NK is None else self.token_NK.split(lengths)
        parts = zip(self.logp_NK.split(lengths), tokens, strict=True)
        return [NextTokens(logp, token, self.vocabulary) for logp, token in parts]

    def first(self) -> NextTokens:
        return NextTokens(self.logp_NK[:1], None if self.token_NK is None else self.token_NK[:1], self.vocabulary)

    @classmethod
    def joined(cls, parts: Sequence[NextTokens], device: torch.device) -> NextTokens:
        """Return the distributions of parts, one after the other, on a device."""
        tokens = [part.token_NK for part in parts if part.token_NK is not None]
        logp_NK = upload(torch.cat([part.logp_NK for part in parts]), device)
        return cls(logp_NK, upload(torch.cat(tokens), device) if tokens else None, parts[0].vocabulary)


def grouped(logp_NV: Tensor, token_NK: Tensor | None) -> Tensor:
    """Return the log-probabilities of the chosen tokens, and of all others together, [N, K + 1]. If no tokens are
    chosen, return all log-probabilities, [N, V]."""
    if token_NK is None:
        return logp_NV
    token_NK = token_NK.long()
    others_N1 = logp_NV.scatter(1, token_NK, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([logp_NV.gather(1, token_NK), others_N1], 1)


def kl_divergence(logp_NK: Tensor, teacher_logp_NK: Tensor) -> Tensor:
    """Return [N] in nats, the KL divergence of p (`logp_NK`) from q (`teacher_logp_NK`): sum p (log p - log q)."""
    return (logp_NK.exp() * (logp_NK - teacher_logp_NK)).sum(1)


@dataclass(frozen=True)
class Divergence:
    """A divergence between the policy's distribution p and the teacher's q.

    `reverse_kl` is KL(p || q), and `forward_kl` is KL(q || p). `jsd` is the generalized Jensen-Shannon divergence (GKD,
    arXiv:2306.13649, equation 1): beta KL(q || m) + (1 - beta) KL(p || m) with the mixture m = beta q + (1 - beta) p,
    for a `beta` between 0 and 1.
    """

    kind: DivergenceName = "reverse_kl"
    beta: float = 0.5

    def __call__(self, logp_NK: Tensor, teacher_logp_NK: Tensor) -> Tensor:
        """Return [N] in nats, the divergence between p (`logp_NK`) and q (`teacher_logp_NK`)."""
        if self.kind == "reverse_kl":
            return kl_divergence(logp_NK, teacher_logp_NK)
        if self.kind == "forward_kl":
            return kl_divergence(teacher_logp_NK, logp_NK)
        beta, other = self.beta, 1 - self.beta
        mixed_NK = torch.logaddexp(teacher_logp_NK + math.log(beta), logp_NK + math.log(other))
        return beta * kl_divergence(teacher_logp_NK, mixed_NK) + other * kl_divergence(logp_NK, mixed_NK)

    def gradient(self, logp_NV: Tensor, gap_NV: Tensor, value_N: Tensor) -> Tensor:
        """Return [N, V], the derivative of the divergence with respect to x, if p is the softmax of x.

        With the derivative g_v of the divergence with respect to p_v, it is p_v (g_v - sum_u p_u g_u).

        Args:
            logp_NV: log-probabilities of the policy.
            gap_NV: log(p / q) of each token, or of the group of tokens that it belongs to.
            value_N: the divergence.
        """
        if self.kind == "reverse_kl":
            return logp_NV.exp().mul_(gap_NV - value_N[:, None])
        if self.kind == "forward_kl":
            return logp_NV.exp().sub_((logp_NV - gap_NV).exp_())
        # log(p / m), by log(m / p) = log(1 - beta + beta q / p).
        constant = gap_NV.new_full((), math.log(1 - self.beta))
        slope_NV = torch.logaddexp(math.log(self.beta) - gap_NV, constant).mul_(self.beta - 1)
        p_NV = logp_NV.exp()
        return p_NV * (slope_NV - (p_NV * slope_NV).sum(1, keepdim=True))


class _HeadDivergence(torch.autograd.Function):
    """See `head_divergence`; differentiable in hidden states, weight and bias. Backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, teacher: NextTokens,
        divergence: Divergence, shape: LogitShape, temperature: float, tiles: list[slice],
    ) -> Tensor:  # fmt: skip
        value_N = teacher.logp_NK.new_empty(len(hidden_ND))
        for rows in tiles:
            logp_nV, _ = _softmax(hidden_ND[rows], weight_VD, bias_V, teacher.vocabulary, shape, temperature)
            value_N[rows] = divergence(*_both(logp_nV, teacher, rows))
        # Under ZeRO-3 the weight is gathered again for backward, so keep the parameter and not its current storage.
        ctx.weight, ctx.bias = weight_VD, bias_V
        ctx.options = teacher, divergence, shape, temperature, tiles
        ctx.save_for_backward(hidden_ND, value_N)
        return value_N

    @staticmethod
    def backward(ctx: Any, dvalue_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, value_N = ctx.saved_tensors
        teacher, divergence, shape, temperature, tiles = ctx.options
        weight_VD, bias_V = ctx.weight.detach(), None if ctx.bias is None else ctx.bias.detach()
        needs_weight, exact, V = ctx.weight.requires_grad, value_N.dtype, teacher.vocabulary
        dhidden_ND = torch.zeros_like(hidden_ND)
        # Summed over tiles in float32: in bfloat16 small contributions would be lost by rounding.
        dweight_VD = torch.zeros_like(weight_VD, dtype=exact) if needs_weight else None
        dbias_V = torch.zeros_like(bias_V, dtype=exact) if needs_weight and bias_V is not None else None
        for rows in tiles:
            logp_nV, logits_nV = _softmax(hidden_ND[rows], weight_VD, bias_V, V, shape, temperature)
            gap_nV = _ungrouped(torch.sub(*_both(logp_nV, teacher, rows)), teacher, rows)
            dx_nV = divergence.gradient(logp_nV, gap_nV, value_N[rows]).mul_(dvalue_N[rows, None] / temperature)
            dx_nV = shape.backward_(dx_nV, logits_nV).to(weight_VD.dtype)
            dhidden_ND[rows] = dx_nV @ weight_VD[:V]
            if dweight_VD is not None:
                add_product(dweight_VD[:V], dx_nV.T, hidden_ND[rows])
            if dbias_V is not None:
                dbias_V[:V] += dx_nV.sum(0, dtype=exact)
        dweight_VD = None if dweight_VD is None else dweight_VD.to(weight_VD.dtype)
        dbias_V = None if dbias_V is None or bias_V is None else dbias_V.to(bias_V.dtype)
        return dhidden_ND, dweight_VD, dbias_V, None, None, None, None, None


def head_divergence(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, shape: LogitShape, temperature: float, *,
    teacher: NextTokens, divergence: Divergence, tile_bytes: int | None = None,
) -> tuple[Tensor]:  # fmt: skip
    """Return the divergence between the model's and the teacher's next token, [N] in nats, float32 and differentiable.

    Both distributions are over the teacher's `vocabulary`. Tokens that the teacher does not distinguish count as one
    token, which gives a lower bound by the data-processing inequality. Dropping them and normalizing the others would
    be a biased estimate of the teacher (Sparse Logit Sampling, arXiv:2503.16870).

    Args:
        hidden_ND: the hidden state before each position.
        weight_VD, bias_V: the output head.
        teacher: the teacher's distributions, on the same device.
        tile_bytes: size limit of a tile of float32 logits. Default: as for log-probabilities.
    """
    tiles = _tiles(hidden_ND, teacher.vocabulary, tile_bytes)
    return (_HeadDivergence.apply(hidden_ND, weight_VD, bias_V, teacher, divergence, shape, temperature, tiles),)


@torch.no_grad()
def most_likely(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, shape: LogitShape, temperature: float, *,
    vocabulary: int, top_k: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the tensors of `NextTokens`, in host memory, for the `top_k` most probable tokens, or for all if it is 0.

    Args:
        hidden_ND, weight_VD, bias_V: see `head_divergence`.
        vocabulary: see `NextTokens`.
        top_k: less than `vocabulary`.
    """
    logp, tokens = [], []
    for rows in _tiles(hidden_ND, vocabulary, None):
        logp_nV, _ = _softmax(hidden_ND[rows], weight_VD, bias_V, vocabulary, shape, temperature)
        token_nk = logp_nV.topk(top_k, 1).indices if top_k else None
        logp.append(grouped(logp_nV, token_nk).cpu())
        if token_nk is not None:
            tokens.append(token_nk.int().cpu())
    return (torch.cat(logp), *([torch.cat(tokens)] if tokens else []))


def _tiles(hidden_ND: Tensor, vocabulary: int, tile_bytes: int | None) -> list[slice]:
    limit = tile_bytes or (GPU_TILE_BYTES if hidden_ND.is_cuda else TILE_BYTES)
    return slices(len(hidden_ND), max(1, limit // (4 * vocabulary)))


def _softmax(
    hidden_nD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, V: int, shape: LogitShape, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the first V tokens, in float32 or higher, and their logits in the model's type."""
    logits_nV = logits_of(hidden_nD, weight_VD, bias_V, slice(0, V), shape)
    exact = torch.promote_types(logits_nV.dtype, torch.float32)
    return (logits_nV.to(exact) / temperature).log_softmax(1), logits_nV


def _both(logp_nV: Tensor, teacher: NextTokens, rows: slice) -> tuple[Tensor, Tensor]:
    return grouped(logp_nV, None if teacher.token_NK is None else teacher.token_NK[rows]), teacher.logp_NK[rows]


def _ungrouped(value_nK: Tensor, teacher: NextTokens, rows: slice) -> Tensor:
    """Return [n, V]: each distinguished token has its own value, and all others have that of the last column."""
    if teacher.token_NK is None:
        return value_nK
    value_nV = value_nK[:, -1:].repeat(1, teacher.vocabulary)
    return value_nV.scatter_(1, teacher.token_NK[rows].long(), value_nK[:, :-1])
