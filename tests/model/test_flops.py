"""Operations by the formula, against those that torch counts in models made on the spot."""

import math

import pytest
import torch
from tiny_models import STATEFUL, VOCABULARY, build, tiny_config
from torch.utils.flop_counter import FlopCounterMode

from hybrid_grpo.config import LoraConfig
from hybrid_grpo.model.flops import Cost
from hybrid_grpo.model.lora import Adapters

S = 40
WIDE = {"sliding_window": 512}


def counted(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("architecture, changes", [
    ("qwen2", {}), ("qwen3", {}), ("llama", {}), ("gemma2", WIDE), ("glm4", {}), ("gpt2", {}), ("qwen3_moe", {}),
    ("gemma4_text", WIDE),
])  # fmt: skip
def test_a_step_of_training_and_of_decoding_cost_what_torch_counts(architecture, changes):
    model = build(tiny_config(architecture, **changes))
    if architecture.endswith("moe"):
        # Else torch does not see the products of experts.
        model.set_experts_implementation("eager")
    cost, ids = Cost.of(model), torch.arange(S)[None] % VOCABULARY
    forward = counted(lambda: model(ids))
    assert cost.forward(S, S, S) == pytest.approx(forward, rel=0.03)
    assert cost.training(S, S, S) == pytest.approx(counted(lambda: model(ids).logits.sum().backward()), rel=0.03)
    with torch.no_grad():
        cache = model(ids[:, :-1]).cache
        step = counted(lambda: model(ids[:, -1:], cache=cache))
    assert cost.forward(1, S, 1) == pytest.approx(step, rel=0.03)


def test_frozen_weights_cost_no_gradient_of_their_own():
    model = build(tiny_config("qwen2", layers=6))
    whole = Cost.of(model)
    Adapters(model, LoraConfig(rank=2, alpha=4), seed=0)
    cost, ids = Cost.of(model), torch.arange(S)[None] % VOCABULARY
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (cost.body_trained, cost.head_trained) == (trained, 0) and cost.body == whole.body + trained
    # The first adapted layers need no gradient of their input.
    assert cost.training(S, S, S) == pytest.approx(counted(lambda: model(ids).logits.sum().backward()), rel=0.03)
    assert cost.training(S, S, S) < 0.9 * whole.training(S, S, S)


def test_the_formula_is_palms():
    cost = Cost(body=7e9, body_trained=7e9, head=0.0, head_trained=0.0, width=2 * 32 * 128, layers={math.inf: 30})
    tokens, context = 1000.0, 2048
    assert cost.training(tokens, context, 0) == tokens * (6 * 7e9 + 12 * 30 * 32 * 128 * context)
    assert cost.forward([1.0, 2.0], [0, 0], [0, 0]).tolist() == [14e9, 28e9]


def test_a_window_bounds_what_a_token_attends_to():
    full, cut = (Cost.of(build(tiny_config("mistral", sliding_window=window))) for window in (None, 6))
    assert cut.forward(1, 1000, 0) == full.forward(1, 6, 0) < full.forward(1, 7, 0)
    every_other = Cost.of(build(tiny_config("gemma2")))
    assert every_other.layers == {6: 1, math.inf: 1}


@pytest.mark.parametrize("architecture", STATEFUL)
def test_layers_with_a_state_are_counted_by_their_parameters(architecture):
    cost = Cost.of(build(tiny_config(architecture)))
    assert cost.body > 0 and cost.forward(1, 100, 1) >= 2 * (cost.body + cost.head)
