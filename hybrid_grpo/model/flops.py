"""Floating-point operations of a decoder model, from its parameters and the tokens that it reads.

The formula is PaLM's (arXiv:2204.02311, appendix B): per token, two operations for each parameter of a matrix product
in a forward and four more in a backward, plus attention. What is computed twice to save memory counts once.
"""

import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

from hybrid_grpo.model.architectures import layer_configs
from hybrid_grpo.model.gathered_weights import whole_shape

Floats = NDArray[np.float64]

_EXPERTS = re.compile(r"(^|\.)experts\.")
"""Matches the parameters of experts; a token uses only a few experts."""


@dataclass(frozen=True)
class Cost:
    """The cost of a token, in numbers of parameters that take part in matrix products.

    The arguments of the methods are numbers, or arrays of one shape: the model reads `tokens` tokens, each attends to
    `context` entries on average, and the head computes the distribution after `scored` of them.
    """

    body: float
    """Parameters of the layers that a token passes through; in a mixture of experts, only of the experts it uses."""
    body_trained: float
    """Parameters among `body` that have a gradient."""
    head: float
    """Parameters of the output head. Looking up an embedding is not a product."""
    head_trained: float
    width: int
    """Elements of a query and of a value, over all heads of a layer; the mean over layers if they differ."""
    layers: dict[float, int]
    """Number of layers by the most entries a token attends to: infinity without a window, 0 without attention."""

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return the cost of a token for a transformers model, sharded or not."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        apart = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        apart.add(id(head.weight))
        experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts")
        used = _first(config, "num_experts_per_tok")
        body = body_trained = 0.0
        for name, parameter in model.named_parameters():
            shape = whole_shape(parameter)
            if id(parameter) in apart or len(shape) < 2:
                continue
            count = prod(shape) * (used / experts if experts and used and _EXPERTS.search(name) else 1)
            body += count
            body_trained += count * parameter.requires_grad
        of_head = whole_shape(head.weight).numel()
        widths = list(map(_width, layer_configs(model.config)))
        trained = of_head * head.weight.requires_grad
        return cls(body, body_trained, of_head, trained, sum(widths) // len(widths), _layers(config))

    def forward(self, tokens: ArrayLike, context: ArrayLike, scored: ArrayLike) -> Floats:
        """Return the operations of a forward pass."""
        tokens = np.asarray(tokens, float)
        return tokens * (2 * self.body + self._attention(context)) + 2 * self.head * np.asarray(scored, float)

    def training(self, tokens: ArrayLike, context: ArrayLike, scored: ArrayLike) -> Floats:
        """Return the operations of a forward and its backward. A frozen weight costs only the gradient of its input."""
        tokens = np.asarray(tokens, float)
        of_body = tokens * (4 * self.body + 2 * self.body_trained + 3 * self._attention(context))
        return of_body + np.asarray(scored, float) * (4 * self.head + 2 * self.head_trained)

    def _attention(self, context: ArrayLike) -> Floats:
        """Operations of a token's attention: query times keys, and weights times values."""
        entries = sum(count * np.minimum(np.asarray(context, float), most) for most, count in self.layers.items())
        return 2.0 * self.width * np.asarray(entries, float)


def _width(config: Any) -> int:
    heads = _first(config, "num_attention_heads")
    if not heads:
        return 0
    head = _first(config, "qk_head_dim", "head_dim") or config.hidden_size // heads
    return int(heads * (head + (_first(config, "v_head_dim") or head)))


def _layers(config: Any) -> dict[float, int]:
    window = _first(config, "sliding_window") if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return {window or np.inf: config.num_hidden_layers}
    most = {"full_attention": np.inf, "attention": np.inf, "sliding_attention": window or np.inf}
    return dict(Counter(most.get(kind, 0) for kind in kinds))


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None))), None)
