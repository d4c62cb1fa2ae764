"""Which layers ZeRO-3 may fetch whole. That steps stay the same is seen in tests/test_engine.py, and that a cut graph
and adapters train as before in tests/run/test_verification.py and tests/model/test_lora.py."""

import pytest
import torch
from tiny_models import ARCHITECTURES, build, tiny_config

from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.towers import whole_layers


def numbers(model):
    layers = list(model.base_model.layers)
    return [layers.index(layer) for layer in whole_layers(model)]


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"gpt2"}))
def test_all_layers_of_a_model_that_trains(architecture):
    model = build(tiny_config(architecture), ATTENTION)
    assert numbers(model) == list(range(len(model.base_model.layers))) != []


def test_the_first_layer_that_trains_and_those_behind_it():
    model = build(tiny_config("qwen2", layers=4), ATTENTION).requires_grad_(False)
    assert numbers(model) == []
    model.base_model.layers[1].mlp.requires_grad_(True)
    assert numbers(model) == [1, 2, 3]


def test_the_input_of_a_layer_has_a_gradient_only_where_one_is_computed():
    model = build(tiny_config("qwen2"))
    model.get_input_embeddings().requires_grad_(False)
    first, seen = whole_layers(model)[0], []
    first.register_forward_pre_hook(lambda _, given: seen.append(given[0].requires_grad))
    ids = torch.tensor([[1, 2, 3]])
    model(ids).logits.sum().backward()
    with torch.no_grad():
        model(ids)
    assert seen == [True, False]
    assert all(p.grad is not None for p in first.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"gpt2"}))
def test_when_deepspeed_reduces_a_layer_all_its_gradients_exist(architecture, checkpointing):
    """It does so in this hook, here with embeddings that do not train."""
    model = build(tiny_config(architecture)).train()
    model.get_input_embeddings().requires_grad_(False)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})

    def grown(layer):
        return {name for name, p in layer.named_parameters() if p.grad is not None}

    layers, seen = whole_layers(model), {}
    for layer in layers:
        layer.register_full_backward_hook(lambda layer, *_: seen.update({layer: grown(layer)}))
    model(torch.tensor([[1, 2, 3, 4, 5]])).logits.square().sum().backward()
    assert [seen[layer] for layer in layers] == [grown(layer) for layer in layers] and all(seen.values())
