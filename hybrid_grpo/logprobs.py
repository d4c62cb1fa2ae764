"""Log-probability and entropy of chosen tokens, straight from hidden states, without ever holding all logits.

The logits of a micro-batch are the largest tensor of RL training: 4,096 tokens of a 151,936-token vocabulary
take 2.5 GB in float32, several times over. Here they exist one chunk of tokens at a time, in forward and again
in backward. `LogprobModel` puts that in front of any transformers causal language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.attention import Segments, Selection

CHUNK_BYTES = 64 << 20
"""Size of one chunk of float32 logits; a few such temporaries are alive at once."""


@dataclass(frozen=True)
class LogitShape:
    """How a model turns the output of its head into logits: softcap * tanh(scale * x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitShape:
        """Read from a transformers text configuration (Gemma's soft cap; scales of Cohere, Granite and Falcon-H1)."""
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1)
        scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, x: Tensor) -> Tensor:
        """Final logits, in place where x is not needed for a gradient."""
        if self.scale != 1.0:
            x = x.mul_(self.scale)
        return x if self.softcap is None else x.div_(self.softcap).tanh_().mul_(self.softcap)

    def backward_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Gradient with respect to x, from that of the logits; overwrites both arguments."""
        if self.softcap is not None:
            grad.mul_(logits.div_(self.softcap).square_().neg_().add_(1.0))
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


class _TokenLogprobs(torch.autograd.Function):
    """(hidden_ND, weight, bias) -> (logp_N, entropy_N) of targets_N at a temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        shape: LogitShape,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logp_N = torch.empty(len(target_N), dtype=torch.float32, device=hidden_ND.device)
        entropy_N = torch.empty_like(logp_N)
        for part in _chunks(len(target_N), chunk):
            # Both from log p, as the sampler's are: lse - sum p x would cancel where the entropy is small.
            logp = _scaled_logits(hidden_ND[part], weight_VD, bias_V, shape, temperature).log_softmax(-1)
            logp_N[part] = logp.gather(1, target_N[part, None])[:, 0]
            entropy_N[part] = -logp.exp().mul_(logp).sum(-1)
        # Under ZeRO-3 the weight is gathered again for backward: the parameter is kept, not its storage of now.
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.bias = weight_VD, bias_V
        ctx.options = (shape, temperature, chunk)
        ctx.save_for_backward(hidden_ND, target_N, entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, dlogp_N: Tensor | None, dentropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, target_N, entropy_N = ctx.saved_tensors
        dlogp_N = torch.zeros_like(entropy_N) if dlogp_N is None else dlogp_N
        weight_VD, bias_V = ctx.weight.detach(), None if ctx.bias is None else ctx.bias.detach()
        shape, temperature, chunk = ctx.options
        needs_weight = ctx.weight.requires_grad
        dhidden_ND = torch.empty_like(hidden_ND)
        # float32 sums: with bfloat16 ones, every chunk's contribution would be rounded away against the total.
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        dbias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_weight and bias_V is not None else None
        for part in _chunks(len(target_N), chunk):
            x = _scaled_logits(hidden_ND[part], weight_VD, bias_V, shape, temperature)
            logp = x.log_softmax(-1)
            p = logp.exp()
            # d logp_t / dx = onehot_t - p;  dH / dx = -p (log p + H). In place: x, p and logp are all there is.
            if dentropy_N is None:
                dx = p.mul_(-dlogp_N[part, None])
            else:
                dx = logp.add_(entropy_N[part, None]).mul_(-dentropy_N[part, None]).sub_(dlogp_N[part, None]).mul_(p)
            del p, logp
            dx.scatter_add_(1, target_N[part, None], dlogp_N[part, None])
            dx = shape.backward_(dx, x.mul_(temperature)).div_(temperature).to(weight_VD.dtype)
            del x
            dhidden_ND[part] = dx @ weight_VD
            if dweight_VD is not None:
                if weight_VD.dtype == torch.float32:
                    dweight_VD.addmm_(dx.T, hidden_ND[part])
                else:
                    dweight_VD.add_(dx.T @ hidden_ND[part])
            if dbias_V is not None:
                dbias_V.add_(dx.sum(0, dtype=torch.float32))
            del dx
        like_weight = [None if d is None else d.to(weight_VD.dtype) for d in (dweight_VD, dbias_V)]
        return dhidden_ND, *like_weight, None, None, None, None


def _chunks(n: int, chunk: int) -> list[slice]:
    return [slice(i, min(i + chunk, n)) for i in range(0, n, chunk)]


def _scaled_logits(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, shape: LogitShape, temperature: float
) -> Tensor:
    """float32 logits over the temperature; the product has the model's own type, as in its own forward."""
    x = shape(nn.functional.linear(hidden_ND, weight_VD, bias_V)).float()
    return x.div_(temperature) if temperature != 1.0 else x


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    *,
    shape: LogitShape | None = None,
    temperature: float = 1.0,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, differentiable.

    Args:
        hidden_ND: [N, D], the state before each target.
        weight_VD, bias_V: the output head.
        target_N: int64 [N].
        shape: scale and soft cap of the logits.
        temperature: the softmax is that of logits / temperature.
        chunk_bytes: bound on one chunk of float32 logits.

    Returns:
        logp_N and entropy_N, float32, in nats.
    """
    chunk = max(1, chunk_bytes // (4 * weight_VD.shape[0]))
    shape = LogitShape() if shape is None else shape
    logp_N, entropy_N = _TokenLogprobs.apply(hidden_ND, weight_VD, bias_V, target_N, shape, temperature, chunk)
    return logp_N, entropy_N


class LogprobModel(nn.Module):
    """A causal language model whose forward gives log-probabilities and entropies of chosen tokens.

    The model's own output head computes them: its forward is replaced on this instance, so that an engine's
    hooks around the head (which gather its weight under ZeRO-3) stay where they are.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model
        self.shape = LogitShape.of(model.config.get_text_config())
        head = model.get_output_embeddings()
        head.forward = MethodType(_head_forward, head)

    def forward(
        self,
        input_ids_bS: Tensor,
        position_ids_bS: Tensor,
        source: Selection,
        target_N: Tensor,
        segments: Segments | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Score tokens.

        Args:
            input_ids_bS, position_ids_bS: int64, right-padded: causal attention needs no mask for padding on the
                right; or one row that `segments` divides, for a model with `ATTENTION`.
            source: picks of all [b * S] tokens the one before each token to score.
            target_N: int64, the tokens to score.
            temperature: see `token_logprobs`.

        Returns:
            logp_N and entropy_N, float32.
        """
        packed = {} if segments is None else {"batch": segments}
        out = self.model.base_model(input_ids=input_ids_bS, position_ids=position_ids_bS, use_cache=False, **packed)
        head = self.model.get_output_embeddings()
        hidden_ND = source(out.last_hidden_state.flatten(0, 1))
        logp_N, entropy_N = head(hidden_ND, target_N, self.shape, temperature)
        return logp_N, entropy_N


def _head_forward(
    head: nn.Linear, hidden_ND: Tensor, target_N: Tensor, shape: LogitShape, temperature: float
) -> tuple[Tensor, Tensor]:
    return token_logprobs(hidden_ND, head.weight, head.bias, target_N, shape=shape, temperature=temperature)
