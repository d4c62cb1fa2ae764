"""Log-probability and entropy of given tokens from hidden states, without holding all logits at once.

The logits of a micro-batch are the largest tensor of RL training: for 4,096 tokens and a vocabulary of 151,936 they
take 2.5 GB in float32, several times over. Here they are computed tile by tile (some tokens by some columns of the
vocabulary), in forward and again in backward. `LogprobModel` does this for any transformers causal language model.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from hybrid_grpo.model.attention import Batch
from hybrid_grpo.model.layers import install_fused_layers, tile_mlps
from hybrid_grpo.model.routing import Replay, routed, tokens
from hybrid_grpo.model.sidecars import find
from hybrid_grpo.model.sight import ImageInputs
from hybrid_grpo.model.softmax import TiledSoftmax, on_gpu_kernel, softmax_gradient
from hybrid_grpo.model.states import install_state_functions
from hybrid_grpo.model.support import MaskColumns
from hybrid_grpo.model.towers import text_forward
from hybrid_grpo.model.ulysses import SharedTargets
from hybrid_grpo.model.upload import Selection, upload

TILE_BYTES = 64 << 20
"""Bytes of one tile of logits in float32; a few such temporaries are alive at once."""
TILE_COLUMNS = 4096
"""Vocabulary columns of a tile: enough that summing over tiles costs little next to the matrix products, and few
enough that a tile has 4,096 rows, so that the output head is read and its gradient written once."""

GPU_TILE_BYTES = 256 << 20
GPU_TILE_COLUMNS = 8192
"""Larger tiles for the GPU kernel, which reads them in the model's dtype and without temporaries. Each column of tiles
adds to the gradient of the hidden states, so wider tiles mean that it is read and written less often."""


@dataclass(frozen=True)
class LogitShape:
    """How a model turns the output x of its head into logits: softcap * tanh(scale * x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None
    vocabulary: int | None = None
    """The softmax is over this many of the head's first columns; None: over all. Padding makes products fast."""

    @classmethod
    def of(cls, config: Any, vocabulary: int | None = None) -> Self:
        """Read a transformers text configuration: Gemma's soft cap, and the scales of Cohere, Granite and Falcon-H1.
        HyperCLOVA X multiplies by what Granite divides by."""
        scaling = float(getattr(config, "logits_scaling", None) or 1)
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scale *= scaling if getattr(config, "model_type", "") == "hyperclovax" else 1 / scaling
        scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
        return cls(scale, getattr(config, "final_logit_softcapping", None), vocabulary)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of x, which is overwritten."""
        if self.scale != 1.0:
            x = x.mul_(self.scale)
        return x if self.softcap is None else x.div_(self.softcap).tanh_().mul_(self.softcap)

    def backward_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient with respect to x, given the gradient of the logits. Both arguments are overwritten."""
        if self.softcap is not None:
            grad.mul_(logits.float().div_(self.softcap).square_().neg_().add_(1.0))
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


class _TokenLogprobs(torch.autograd.Function):
    """See `token_logprobs`; differentiable in hidden states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, shape: LogitShape,
        temperature: float, tiles: tuple[list[slice], list[slice]], support: MaskColumns | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        softmax = TiledSoftmax(target_N, temperature)
        row_tiles, column_tiles = tiles
        for columns in column_tiles:
            _, weight, bias = _part(weight_VD, bias_V, columns, support)
            for rows in row_tiles:
                x = logits_of(hidden_ND[rows], weight, bias, slice(None), shape)
                softmax.add(rows, columns.start, x if support is None else support.hide(x, rows, columns))
        logp_N, entropy_N = softmax.logp_N(), softmax.entropy_N()
        # Under ZeRO-3 the weight is gathered again for backward, so keep the parameter, not its present storage.
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.bias = weight_VD, bias_V
        ctx.options = (shape, temperature, tiles, support)
        ctx.save_for_backward(hidden_ND, target_N, softmax.normalizer_N(), entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, dlogp_N: Tensor | None, dentropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, target_N, normalizer_N, entropy_N = ctx.saved_tensors
        dlogp_N = torch.zeros_like(entropy_N) if dlogp_N is None else dlogp_N.contiguous()
        weight_VD, bias_V = ctx.weight, ctx.bias
        shape, temperature, (row_tiles, column_tiles), support = ctx.options
        needs_weight = ctx.weight.requires_grad
        # Sum over tiles in float32: in bfloat16, small contributions to a large total would be rounded away.
        dhidden_ND = torch.zeros_like(hidden_ND, dtype=torch.float32)
        # Columns outside all supports, and beyond the vocabulary, keep the gradient 0.
        new = torch.empty_like if support is None and shape.vocabulary is None else torch.zeros_like
        dweight_VD = new(weight_VD) if needs_weight else None
        dbias_V = new(bias_V) if needs_weight and bias_V is not None else None
        for columns in column_tiles:
            chosen, weight, bias = _part(weight_VD, bias_V, columns, support)
            # A column of several tiles sums its parts in float32 too.
            dweight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight and len(row_tiles) > 1 else None
            dbias = None if dbias_V is None else torch.zeros(len(weight), device=weight.device)
            for rows in row_tiles:
                x = logits_of(hidden_ND[rows], weight, bias, slice(None), shape)
                x = x if support is None else support.hide(x, rows, columns)
                dx = softmax_gradient(
                    x, columns.start, target_N[rows], normalizer_N[rows], entropy_N[rows], dlogp_N[rows],
                    None if dentropy_N is None else dentropy_N[rows], temperature, keep=shape.softcap is not None,
                )  # fmt: skip
                dx = shape.backward_(dx, x).to(weight.dtype)
                del x
                add_product(dhidden_ND[rows], dx, weight)
                if dweight is not None:
                    add_product(dweight, dx.T, hidden_ND[rows])
                elif dweight_VD is not None:
                    dweight_VD[chosen] = dx.T @ hidden_ND
                if dbias is not None:
                    dbias.add_(dx.sum(0, dtype=torch.float32))
                del dx
            if dweight_VD is not None and dweight is not None:
                dweight_VD[chosen] = dweight
            if dbias_V is not None and dbias is not None:
                dbias_V[chosen] = dbias
        return dhidden_ND.to(hidden_ND.dtype), dweight_VD, dbias_V, None, None, None, None, None


def _part(
    weight_VD: Tensor, bias_V: Tensor | None, columns: slice, support: MaskColumns | None
) -> tuple[slice | Tensor, Tensor, Tensor | None]:
    """Return the index in the vocabulary of some of the head's columns, and their weights and biases."""
    chosen = columns if support is None else support.id_U[columns]
    return chosen, weight_VD[chosen], None if bias_V is None else bias_V[chosen]


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b"""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def slices(n: int, most: int) -> list[slice]:
    """Split the range 0 to n into as few slices as possible, of about equal length and at most `most` long. Long slices
    begin at multiples of 64, since a GPU needs that for fast matrix products."""
    count = max(1, -(-n // most))
    unit = 64 if n // count >= 1024 else 1
    bounds = [n * i // count // unit * unit for i in range(count)] + [n]
    return [slice(*pair) for pair in pairwise(bounds)]


def logits_of(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, columns: slice, shape: LogitShape) -> Tensor:
    """Return some columns of the logits, in the model's dtype, as its own forward computes them."""
    bias = None if bias_V is None else bias_V[columns]
    return shape(nn.functional.linear(hidden_ND, weight_VD[columns], bias))


def token_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_N: Tensor, *,
    support: MaskColumns | None = None, shape: LogitShape | None = None, temperature: float = 1.0,
    tile_bytes: int | None = None, tile_columns: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the log-probability of each target and the entropy there, both float32 [N] in nats, differentiable.

    Args:
        hidden_ND: the hidden state before each target.
        weight_VD, bias_V: the output head; the weight may be in eight bits.
        support: the softmax of each target, and its entropy, are over these tokens only. Default: the vocabulary.
        temperature: the softmax is over logits / temperature.
        tile_bytes, tile_columns: bounds of one tile of logits. Default: `TILE_BYTES` and `TILE_COLUMNS`, or the GPU's.
    """
    kernel = on_gpu_kernel(hidden_ND)
    shape = LogitShape() if shape is None else shape
    width = (shape.vocabulary or len(weight_VD)) if support is None else len(support.id_U)
    columns = slices(width, tile_columns or (GPU_TILE_COLUMNS if kernel else TILE_COLUMNS))
    row_bytes = (hidden_ND.element_size() if kernel else 4) * max(s.stop - s.start for s in columns)
    rows = slices(len(target_N), max(1, (tile_bytes or (GPU_TILE_BYTES if kernel else TILE_BYTES)) // row_bytes))
    target_N = (target_N if support is None else support.target_N).long().contiguous()
    tiles = rows, columns
    logp_N, entropy_N = _TokenLogprobs.apply(hidden_ND, weight_VD, bias_V, target_N, shape, temperature, tiles, support)
    return logp_N, entropy_N


HeadFunction = Callable[[Tensor, Tensor, Tensor | None, LogitShape, float], tuple[Tensor, ...]]
"""Computes further outputs from hidden states and the output head; see `LogprobModel.forward`."""


@dataclass(frozen=True)
class DistinctTargets:
    """The different pairs of a hidden state and its target, as rows that begin alike have many in common."""

    source: Selection
    target_U: Tensor
    pair: Selection
    """Selects, from U pairs, that of each of N targets."""

    def spread(self, *values_U: Tensor) -> tuple[Tensor, ...]:
        """Return the values of all N targets."""
        return tuple(map(self.pair, values_U))

    def head(self, more: HeadFunction) -> HeadFunction:
        """Return what computes `more` of all N targets from U hidden states."""
        return lambda hidden_UD, *others: more(self.pair(hidden_UD), *others)

    @classmethod
    def of(cls, source: np.ndarray, target_N: np.ndarray, device: torch.device) -> Self | None:
        """Return the pairs if they save a tenth of the head's work. `source`: the place of each hidden state."""
        _, first, pair_N = np.unique((source << 32) + target_N, return_index=True, return_inverse=True)
        if len(first) > 0.9 * len(pair_N):
            return None
        return cls(Selection(source[first], device), upload(target_N[first], device), Selection(pair_N, device))


def squared_probabilities(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, shape: LogitShape, temperature: float
) -> tuple[Tensor]:
    """Return the sum over the vocabulary of the squared probabilities after each hidden state, float32 [N]: a
    `HeadFunction`, which computes the logits of some rows at a time."""
    square_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
    for rows in slices(len(hidden_ND), max(1, TILE_BYTES // (4 * len(weight_VD)))):
        x = logits_of(hidden_ND[rows], weight_VD, bias_V, slice(shape.vocabulary), shape).float() / temperature
        square_N[rows] = torch.exp((2 * x).logsumexp(1) - 2 * x.logsumexp(1))
    return (square_N,)


class LogprobModel(nn.Module):
    """A causal language model whose forward returns log-probabilities and entropies, over its first `vocabulary` ids.

    The output head computes them. Only the forward of this instance's head is replaced, so that an engine's hooks
    around it, which gather its weight under ZeRO-3, still run. `keeping` makes the context of the layers.
    """

    def __init__(self, model: Any, vocabulary: int | None = None, keeping: Any = nullcontext) -> None:
        super().__init__()
        self.model: Any = model
        self._keeping = keeping
        self._is_prepared = False
        install_state_functions(model)
        config = model.config.get_text_config()
        padded = vocabulary is not None and vocabulary < config.vocab_size
        self.shape = LogitShape.of(config, vocabulary if padded else None)
        head = model.get_output_embeddings()

        def scored(
            hidden_ND: Tensor, target_N: Tensor, support: MaskColumns | None, temperature: float,
            more: HeadFunction | None = None,
        ) -> tuple[Tensor, ...]:  # fmt: skip
            w, b, shape = head.weight, head.bias, self.shape
            found = token_logprobs(hidden_ND, w, b, target_N, support=support, shape=shape, temperature=temperature)
            if more is None:
                return found
            # A head in eight bits is unpacked by what reads its rows, and here in full.
            return *found, *more(hidden_ND, w if w.is_floating_point() else w[:], b, shape, temperature)

        head.forward = scored

    def forward(
        self, input_ids_bS: Tensor, position_ids: Tensor, source: Selection, target_N: Tensor, segments: Batch | None,
        sidecars: tuple[Any, ...], temperature: float, more: HeadFunction | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return log-probabilities and entropies, float32 [N] (see `token_logprobs`), then what `more` returns.

        Args:
            input_ids_bS, position_ids: int64; right-padded rows (causal attention needs no mask for them), or
                one packed row that `segments` divides, for a model whose attention is `ATTENTION`. See `text_forward`.
            source: picks, among all b * S tokens, the one before each token to score.
            target_N: int64, the tokens to score.
            sidecars: the tokens to normalize over (default: the whole vocabulary), the experts to route by (default:
                those that the routers choose), the pictures among the tokens, and which targets to compute.
            more: called with the hidden states that `source` picks, weight and bias of the head, its `LogitShape` and
                the temperature, while the weight is gathered.
        """
        if not self._is_prepared:
            install_fused_layers(self.model, input_ids_bS)
            if self.model.is_activation_checkpointing:
                tile_mlps(self.model)
            self._is_prepared = True
        tokens.set(input_ids_bS.numel())
        packed = {} if segments is None else {"batch": segments}
        support, shown = find(sidecars, MaskColumns), find(sidecars, ImageInputs)
        replay = find(sidecars, Replay)
        with self._keeping(input_ids_bS), nullcontext() if replay is None else routed(replay):
            out = text_forward(self.model, input_ids_bS, position_ids, shown, use_cache=False, **packed)
        head, hidden_ND = self.model.get_output_embeddings(), out.last_hidden_state.flatten(0, 1)
        if (own := find(sidecars, DistinctTargets) or find(sidecars, SharedTargets)) is None:
            found: tuple[Tensor, ...] = head(source(hidden_ND), target_N, support, temperature, more)
            return found
        of_all = None if more is None else own.head(more)
        logp_U, entropy_U, *others = head(own.source(hidden_ND), own.target_U, support, temperature, of_all)
        return *own.spread(logp_U, entropy_U), *others
