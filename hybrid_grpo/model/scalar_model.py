"""A causal language model whose head gives one number per token, such as a reward model or a value model.

It is a transformers sequence classifier with one label (`AutoModelForSequenceClassification`), whose head is called at
chosen tokens. Nothing here knows what the numbers mean, or how they are trained.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.model.architectures import undecodable
from hybrid_grpo.model.attention import Segments
from hybrid_grpo.model.layers import install_fused_layers
from hybrid_grpo.model.loading import draw_normal, load_config, load_for_training
from hybrid_grpo.model.states import install_state_functions
from hybrid_grpo.model.upload import Selection

_HEAD = "score"
"""transformers' name for the head of a classifier."""
_NO_CLASSIFIER = "transformers has no sequence classifier of this kind that reads its last token"


class ScalarModel(nn.Module):
    """A sequence classifier whose forward returns one number for each selected token. As in `LogprobModel`, only the
    forward of the head is replaced, so that an engine's hooks around it still run."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model
        install_state_functions(model)
        head = model.score

        def scored(hidden_ND: Tensor) -> Tensor:
            # In float32: bfloat16 has two to three digits, and numbers are compared with each other.
            bias = None if head.bias is None else head.bias.float()
            return nn.functional.linear(hidden_ND.float(), head.weight.float(), bias).squeeze(-1)

        head.forward = scored

    def forward(
        self, input_ids_bS: Tensor, position_ids_bS: Tensor, source: Selection, segments: Segments | None
    ) -> Tensor:
        """Return a number for each token that `source` selects, float32 [N]; see `LogprobModel.forward`."""
        install_fused_layers(self.model, input_ids_bS)
        packed = {} if segments is None else {"batch": segments}
        out = self.model.base_model(input_ids=input_ids_bS, position_ids=position_ids_bS, use_cache=False, **packed)
        value_N: Tensor = self.model.score(source(out.last_hidden_state.flatten(0, 1)))
        return value_N


def scalar_config(name: str, padding: int | None = None, setting: str = "policy.model") -> Any:
    """Return the configuration of a model (folder or hub name) as a classifier with one label and a `padding` token.
    Error messages begin with `setting`, here and in the other functions.

    Raises UserError if transformers has no such classifier for a causal language model of this kind, or if the model is
    already a classifier with several labels.
    """
    config = load_config(name, setting)
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    reason = undecodable(config) or (None if kind else _NO_CLASSIFIER)
    refuse(reason is not None, f"{setting} {name}: {config.model_type}: {reason}: take another model")
    is_classifier = any("ForSequenceClassification" in name for name in config.architectures or [])
    refuse(
        is_classifier and config.num_labels != 1,
        f"{setting} {name} is a classifier with {config.num_labels} labels, and a reward model has 1: use a causal"
        " language model, or a reward model",
    )
    config.num_labels = 1
    config.architectures = [kind.__name__]
    if padding is not None:
        config.pad_token_id = config.get_text_config().pad_token_id = padding
    return config


def check_scalar(name: str, setting: str = "policy.model") -> Any:
    """Return `scalar_config`; also raise UserError unless the classifier reads its last token with a linear head."""
    config = scalar_config(name, setting=setting)
    is_linear = isinstance(getattr(_without_weights(config), _HEAD, None), nn.Linear)
    refuse(not is_linear, f"{setting} {name}: {config.model_type}: {_NO_CLASSIFIER}: take another model")
    return config


def count_parameters(name: str) -> int:
    """Number of parameters of a model (folder or hub name) as a classifier with one label."""
    return sum(parameter.numel() for parameter in _without_weights(scalar_config(name)).parameters())


def _without_weights(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config)


def load_scalar_model(
    policy: PolicyConfig,
    attn_implementation: str,
    seed: int,
    *,
    head_std: float | None = None,
    setting: str = "policy.model",
) -> Any:
    """Load the model that `policy` names as a classifier with one label, without dropout.

    A causal language model gets a new head, drawn with `seed` from a normal distribution with standard deviation
    `head_std` (default: `initializer_range`, as in transformers). Raises UserError as `load_model` and `scalar_config`
    do.
    """
    config = scalar_config(policy.model, setting=setting)
    std = getattr(config.get_text_config(), "initializer_range", 0.02) if head_std is None else head_std
    fresh = {f"{_HEAD}.weight": functools.partial(draw_normal, std=std, seed=seed)}
    return load_for_training(AutoModelForSequenceClassification, policy, config, attn_implementation, fresh, setting)


def padding_token(tokenizer: Any, ends: Collection[int]) -> int:
    """Return the padding token of a classifier: the tokenizer's, unless a text ends with it.

    transformers reads the score at the last token that is not padding. So if the tokenizer's padding token is among
    `ends`, the last tokens of the texts, another token is chosen, a special one if possible.
    """
    candidates = [tokenizer.pad_token_id, tokenizer.eos_token_id, *tokenizer.all_special_ids, *range(len(ends) + 1)]
    return next(token for token in candidates if token is not None and token not in ends)
