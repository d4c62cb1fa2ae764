"""Which layers ZeRO-3 may fetch whole. That steps stay the same is seen in tests/test_engine.py."""

import pytest
from tiny_models import ARCHITECTURES, build, tiny_config

from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.fetching import whole_layers


def numbers(model):
    layers = list(model.base_model.layers)
    return [layers.index(layer) for layer in whole_layers(model)]


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"gpt2"}))
def test_all_layers_of_a_model_that_trains(architecture):
    model = build(tiny_config(architecture), ATTENTION)
    assert numbers(model) == list(range(len(model.base_model.layers))) != []


def test_only_layers_behind_something_that_trains():
    """DeepSpeed would reduce others before their gradients exist."""
    model = build(tiny_config("qwen2", layers=4), ATTENTION)
    model.get_input_embeddings().requires_grad_(False)
    assert numbers(model) == [1, 2, 3]
    model.requires_grad_(False)
    assert numbers(model) == []
    model.base_model.layers[1].mlp.requires_grad_(True)
    assert numbers(model) == [2, 3]
