"""Whole models with fused layers are those of transformers, whatever they take; the kernels are interpreted."""

import functools
import random
from collections import Counter
from copy import deepcopy

import pytest
import torch
from tiny_models import VOCABULARY, build, tiny_config
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hybrid_grpo.config import LoraConfig
from hybrid_grpo.data.packing import pack
from hybrid_grpo.generation import GREEDY, Request, Sampling, generate
from hybrid_grpo.model import layers
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.kernels.gpu import launcher
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.lora import Adapters
from hybrid_grpo.model.routing import recomputed
from hybrid_grpo.model.sidecars import TokenRow

CPU = torch.device("cpu")
TAKEN = {
    "llama": {"_normed": 5, "_gated": 2, "_with_rotation": 2, "_layer": 2},
    "qwen2": {"_normed": 5, "_gated": 2, "_with_rotation": 2, "_layer": 2},
    # A norm of the heads of queries, and one of keys.
    "qwen3": {"_normed": 9, "_gated": 2, "_with_rotation": 2, "_layer": 2},
    "mistral": {"_normed": 5, "_gated": 2, "_with_rotation": 2, "_layer": 2},
    # Experts, which have no MLP as a module.
    "qwen3_moe": {"_normed": 9, "_with_rotation": 2, "_layer": 2},
    # GELU, and norms after attention and MLP too.
    "gemma2": {"_normed": 9, "_with_rotation": 2},
    "gemma3_text": {"_normed": 13, "_with_rotation": 2},
    # A factor on the branch before it is added.
    "granite": {"_normed": 5, "_gated": 2, "_with_rotation": 2},
    # Norms after attention and MLP only.
    "olmo2": {"_normed": 9, "_gated": 2, "_with_rotation": 2},
    # One layer with a state, like those of Qwen3.5; angles for a quarter of a head; a norm with a gate keeps its code.
    "qwen3_next": {"_normed": 7, "_gated": 2, "_with_rotation": 1, "_layer": 1},
    # Attention and MLP side by side, interleaved rotation, layer norms.
    "cohere2": {"_gated": 2},
    "gpt2": {},
}
"""What takes kernels in two layers."""


def taken(model):
    own = [module.__dict__.get("forward", type(module).forward) for module in model.modules()]
    whole = [forward.args[0] if getattr(forward, "func", None) is layers._in_tiles else forward for forward in own]
    forwards = [getattr(forward, "func", forward) for forward in whole]
    names = Counter(getattr(forward, "__wrapped__", forward).__name__ for forward in forwards)
    return {name: names[name] for name in ("_normed", "_gated", "_with_rotation", "_layer") if names[name]}


@pytest.fixture
def launches(monkeypatch):
    """The kernels launched, counted by name."""
    seen = Counter()

    def counted(launch, kernel, grid, *given, **options):
        seen[kernel.__name__] += 1
        return launch(kernel, grid, *given, **options)

    for module in (gpu.norm, gpu.gate, gpu.rotation):
        monkeypatch.setattr(module, "launch", functools.partial(counted, module.launch))
    return seen


def micro_batch():
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (9, 9, 4)]
    completions = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (5, 8, 3)]
    prompts[1] = prompts[0]  # a group, which shares its prompt
    return pack(TokenRow.of(prompts, completions), 10_000, CPU, share="on")[0]


def trained(model, micro, **how):
    """Log-probabilities, and every gradient."""
    logp_N, _ = LogprobModel(model, **how)(*micro.inputs, 1.0)
    (logp_N * torch.linspace(-1, 1, len(logp_N))).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logp": logp_N.detach(), **gradients}


def fused_and_own(architecture, *, checkpointing=False, lora=False, dtype=torch.float32):
    results = []
    for fused in (True, False):
        model = build(tiny_config(architecture), ATTENTION).to(dtype).train()
        if lora:
            adapters = Adapters(model, LoraConfig(rank=2, target_modules="all-linear"), seed=0)
            for adapter in adapters.by_layer.values():
                nn.init.normal_(adapter.up, generator=torch.Generator().manual_seed(1))
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        if fused:
            layers.fuse(model, None)
        results.append((model, trained(model, micro_batch())))
    return results


def test_between_layers_that_are_computed_again_only_what_goes_into_them_is_saved():
    """It can wait in host memory, as `policy.gradient_checkpointing` offload has it on a GPU."""
    model, micro, saved = build(tiny_config("qwen2", layers=5), ATTENTION).train(), micro_batch(), Counter()
    expected = {name: value.clone() for name, value in trained(model, micro).items()}
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": functools.partial(recomputed, False)})
    copies = saved_tensors_hooks(lambda x: saved.update([tuple(x.shape)]) or x.clone(), lambda x: x)
    found = trained(model, micro, keeping=lambda ids: copies)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    # The norm of the model, which is not computed again, saves three more.
    assert saved == {(1, 26, 32): 5 + 3, (1, 26, 1): 2, (1, 26): 1, (32,): 1}


def assert_same(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        gap = (found[name].float() - value.float()).norm() / value.float().norm().clamp(min=1e-3)
        assert gap < tolerance, (name, float(gap))


@pytest.mark.parametrize("architecture", TAKEN)
def test_log_probabilities_and_gradients_are_those_of_the_models_own_code(architecture):
    (model, found), (plain, expected) = fused_and_own(architecture)
    assert taken(model) == TAKEN[architecture] and not taken(plain)
    assert len(expected) == 1 + len(list(model.parameters()))
    assert_same(found, expected, 2e-5)


def test_checkpointed_layers_are_computed_again_with_the_kernels(launches):
    """transformers 5.24 put checkpointing into the forward of a layer's class: a forward of the instance would skip
    it, and the gradients would be right, but the memory that of a run without checkpointing."""
    (_, found), (_, expected) = fused_and_own("qwen3", checkpointing=True)
    assert_same(found, expected, 2e-5)
    # Two layers twice; only the norm of the model is outside.
    assert launches == {
        **{"_add_norm": 2 * 8 + 1, "_add_norm_backward": 9, "_silu_times": 4, "_silu_times_backward": 2},
        **{"_rotate": 4 + 2},
    }


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_are_trained_beside_frozen_norms(checkpointing):
    (model, found), (_, expected) = fused_and_own("qwen2", checkpointing=checkpointing, lora=True)
    assert taken(model) == TAKEN["qwen2"]
    assert len(found) == 1 + 2 * 14 and all("lora" in name for name in found if name != "logp")
    assert_same(found, expected, 2e-5)


def test_in_bfloat16_results_differ_by_rounding_only():
    """Both differ from float32 by as much."""
    (_, found), (_, own) = fused_and_own("qwen3", dtype=torch.bfloat16)
    _, (_, exact) = fused_and_own("qwen3")
    assert_same({"logp": found["logp"]}, {"logp": own["logp"]}, 0.05)

    def error(results):
        return torch.stack([(results[n].float() - v).norm() / v.norm().clamp(min=1e-3) for n, v in exact.items()])

    assert (error(found) < 2 * error(own) + 0.02).all()


class _Biased(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def test_modules_that_differ_keep_their_own_code():
    model = build(tiny_config("qwen2", hidden_act="gelu"), ATTENTION)
    model.model.layers[0].post_attention_layernorm = _Biased(32)
    model.model.norm.variance_epsilon = None
    layer = model.model.layers[1]

    class Own(type(layer)):
        """Gives its attention more than it was given."""

        def forward(self, hidden_states, **more):
            return super().forward(hidden_states, **more, sliding_window=3)

    assert layers.is_residual_layer(layer)
    layer.__class__ = Own
    layers.fuse(model, None)
    assert taken(model) == {"_normed": 3, "_with_rotation": 2}
    assert type(layer) is Own


@pytest.mark.parametrize(
    "architecture, offset, rounds", [("llama", 0, True), ("olmo2", 0, False), ("gemma2", 1, False)]
)
def test_norms_round_where_their_model_does(architecture, offset, rounds):
    norm = build(tiny_config(architecture), ATTENTION).model.norm
    assert layers.norm_formula(norm)[1:] == (offset, rounds)


def test_a_kernel_that_is_wrong_on_the_device_is_not_taken(monkeypatch):
    model = build(tiny_config("qwen2", hidden=40), ATTENTION)
    gpu.proven.cache_clear()
    monkeypatch.setattr(gpu.gate.SiluTimes, "backward", lambda ctx, dout: (dout, dout))
    with pytest.warns(UserWarning, match="training is slower without a Triton kernel: its results differ"):
        layers.fuse(model, CPU)
    assert taken(model) == {"_normed": 5, "_with_rotation": 2, "_layer": 2}
    gpu.proven.cache_clear()


def test_only_models_on_a_gpu_take_kernels(launches, monkeypatch):
    """The function that rotates belongs to all models of a kind: on a CPU it does what it did."""
    other = build(tiny_config("qwen2"), ATTENTION)
    layers.fuse(other, None)
    model = build(tiny_config("qwen2"), ATTENTION)
    trained(model, micro_batch())
    assert not taken(model) and not launches
    monkeypatch.setattr(launcher, "on_gpu", lambda _: True)
    gpu.proven.cache_clear()
    for _ in range(2):
        with torch.inference_mode():  # as generation does, before anything is trained
            layers.install_fused_layers(model, torch.zeros(1))
        assert taken(model) == TAKEN["qwen2"]
    monkeypatch.undo()
    expected = trained(build(tiny_config("qwen2"), ATTENTION), micro_batch())
    assert_same(trained(deepcopy(model), micro_batch()), expected, 2e-5)


def test_prefills_of_a_recognized_model_take_kernels(launches, torch_only):
    """What is sampled in float32 is what the model's own code gives."""
    requests = [Request([1, 2, 3, 4, 5], [0]), Request([7], [1])]
    model, plain = (build(tiny_config("qwen3"), ATTENTION) for _ in range(2))
    layers.fuse(model, None)
    sampling = Sampling(4, temperature=GREEDY)
    found, expected = (generate(each, requests, sampling)[0] for each in (model, plain))
    assert launches["_rotate"] and [c.token_ids for [c] in found] == [c.token_ids for [c] in expected]
    for [one], [other] in zip(found, expected, strict=True):
        assert one.logp == pytest.approx(other.logp, abs=1e-5)
