"""Log-probability and entropy of chosen tokens, straight from hidden states, without ever holding all logits.

The logits of a micro-batch are the largest tensor of RL training: 4,096 tokens of a 151,936-token vocabulary take
2.5 GB in float32, several times over. Here they exist one tile at a time, some columns of the vocabulary for some
tokens, in forward and again in backward. `LogprobModel` puts that in front of any transformers causal language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.model.attention import Segments, Selection
from hybrid_grpo.model.softmax import TiledSoftmax, softmax_gradient

TILE_BYTES = 64 << 20
"""Size of one tile of float32 logits; a few such temporaries are alive at once."""
TILE_COLUMNS = 4096
"""Tokens of the vocabulary in a tile: so many that sums over tiles cost little next to the products, and so few that a
tile takes 4,096 rows, whose products read and write the output head once."""


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
        tiles: tuple[list[slice], list[slice]],
    ) -> tuple[Tensor, Tensor]:
        softmax = TiledSoftmax(target_N, temperature)
        row_tiles, column_tiles = tiles
        for columns in column_tiles:
            for rows in row_tiles:
                softmax.add(rows, columns.start, _logits(hidden_ND[rows], weight_VD, bias_V, columns, shape))
        logp_N, entropy_N = softmax.logp_N(), softmax.entropy_N()
        # Under ZeRO-3 the weight is gathered again for backward: the parameter is kept, not its storage of now.
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.bias = weight_VD, bias_V
        ctx.options = (shape, temperature, tiles)
        ctx.save_for_backward(hidden_ND, target_N, softmax.normalizer_N(), entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, dlogp_N: Tensor | None, dentropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, target_N, normalizer_N, entropy_N = ctx.saved_tensors
        dlogp_N = torch.zeros_like(entropy_N) if dlogp_N is None else dlogp_N
        weight_VD, bias_V = ctx.weight.detach(), None if ctx.bias is None else ctx.bias.detach()
        shape, temperature, (row_tiles, column_tiles) = ctx.options
        needs_weight = ctx.weight.requires_grad
        # Sums over tiles are float32: in bfloat16 every contribution would be rounded away against the total.
        dhidden_ND = torch.empty_like(hidden_ND, dtype=torch.float32)
        dweight_VD = torch.empty_like(weight_VD) if needs_weight else None
        dbias_V = torch.empty_like(bias_V) if needs_weight and bias_V is not None else None
        for columns in column_tiles:
            weight = weight_VD[columns]
            dweight = None if dweight_VD is None else dweight_VD[columns]
            if dweight is not None and dweight.dtype != torch.float32:
                dweight = torch.empty_like(weight, dtype=torch.float32)
            dbias = None if dbias_V is None else torch.zeros(len(weight), device=weight.device)
            for rows in row_tiles:
                x = _logits(hidden_ND[rows], weight_VD, bias_V, columns, shape)
                dx = softmax_gradient(
                    x,
                    columns.start,
                    target_N[rows],
                    normalizer_N[rows],
                    entropy_N[rows],
                    dlogp_N[rows],
                    None if dentropy_N is None else dentropy_N[rows],
                    temperature,
                    keep=shape.softcap is not None,
                )
                dx = shape.backward_(dx, x).to(weight.dtype)
                del x
                _add_product(dhidden_ND[rows], dx, weight, first=columns.start == 0)
                if dweight is not None:
                    _add_product(dweight, dx.T, hidden_ND[rows], first=rows.start == 0)
                if dbias is not None:
                    dbias.add_(dx.sum(0, dtype=torch.float32))
                del dx
            if dweight_VD is not None and dweight is not None and dweight_VD.dtype != torch.float32:
                dweight_VD[columns] = dweight
            if dbias_V is not None and dbias is not None:
                dbias_V[columns] = dbias
        return dhidden_ND.to(hidden_ND.dtype), dweight_VD, dbias_V, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total += a @ b, or where it is the first, which finds nothing there, = a @ b."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0.0 if first else 1.0)
    elif first:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


def _slices(n: int, most: int) -> list[slice]:
    """0 to n in as few pieces as there can be with at most `most`, of about the same length."""
    count = max(1, -(-n // most))
    return [slice(n * i // count, n * (i + 1) // count) for i in range(count)]


def _logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, columns: slice, shape: LogitShape) -> Tensor:
    """Some columns in float32; the product has the model's own type, as in its own forward."""
    bias = None if bias_V is None else bias_V[columns]
    return shape(nn.functional.linear(hidden_ND, weight_VD[columns], bias)).float()


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    *,
    shape: LogitShape | None = None,
    temperature: float = 1.0,
    tile_bytes: int = TILE_BYTES,
    tile_columns: int = TILE_COLUMNS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of its distribution, differentiable.

    Args:
        hidden_ND: [N, D], the state before each target.
        weight_VD, bias_V: the output head.
        target_N: int64 [N].
        shape: scale and soft cap of the logits.
        temperature: the softmax is that of logits / temperature.
        tile_bytes: bound on one tile of float32 logits.
        tile_columns: and on its columns; the rows fill it up.

    Returns:
        logp_N and entropy_N, float32, in nats.
    """
    columns = _slices(len(weight_VD), tile_columns)
    rows = _slices(len(target_N), max(1, tile_bytes // (4 * -(-len(weight_VD) // len(columns)))))
    shape = LogitShape() if shape is None else shape
    given = (hidden_ND, weight_VD, bias_V, target_N.long().contiguous(), shape, temperature, (rows, columns))
    logp_N, entropy_N = _TokenLogprobs.apply(*given)
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
