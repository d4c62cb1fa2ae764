"""Dry runs: the sizes of a model and of its largest micro-batch, against those of real forwards."""

from dataclasses import replace

import pytest
import torch
from memory_plans import micro_batch, recipe
from tiny_models import tiny_config

from hybrid_grpo.config import LoraConfig, PolicyConfig, RolloutConfig, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.layers import fuse
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.run.memory.dry_run import DryRun, NeedsData, largest_micro_batch, measure


@pytest.mark.parametrize(("budget", "share", "tokens"), [
    # A group shares its 512: 512 + 8 * 511 are 4,600, one to a micro-batch, or two.
    *[(5000, "auto", 4600), (10000, "auto", 9200)],
    # 32 rows of 1,023 are 32,736: in nine parts the largest has four of them; at once, there are no more.
    *[(4096, "off", 4092), (700, "off", 1023), (10**6, "off", 32 * 1023)],
])  # fmt: skip
def test_the_largest_micro_batch(budget, share, tokens):
    rollout = RolloutConfig(prompts_per_step=4, num_generations=8)
    config = TrainConfig(policy=PolicyConfig(micro_batch_tokens=budget, shared_prefix=share), rollout=rollout)
    micro = largest_micro_batch(config, batch_plan(config, 1), 512, packs=True, on_gpu=False)
    assert micro.input_ids_bS.shape == (1, tokens)
    padded = largest_micro_batch(config, batch_plan(config, 1), 512, packs=False, on_gpu=False)
    assert padded.input_ids_bS.shape == (min(32, max(1, budget // 1023)), 1023)


def saved(model):
    """The bytes that autograd saves in a real forward, each storage once."""
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(*micro_batch(2, 48).inputs, 1.0)
    for tensor in [*model.parameters(), *model.buffers()]:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def test_a_dry_run_counts_what_a_real_one_keeps():
    """Against the tensors that autograd saves in a real forward, each storage once."""
    config = tiny_config("llama", hidden=64, layers=3)
    dry = DryRun(config, PolicyConfig(dtype="float32"), LoraConfig())
    seen = dry.training(micro_batch(2, 48))
    model = LogprobModel(type(dry.model)._from_config(config, attn_implementation=ATTENTION))
    assert seen.kept == pytest.approx(saved(model), rel=0.1)
    checkpointing = PolicyConfig(dtype="float32", gradient_checkpointing=True)
    checkpointed = DryRun(config, checkpointing, LoraConfig()).training(micro_batch(2, 48))
    assert checkpointed.kept < 0.4 * seen.kept < checkpointed.kept + checkpointed.layers + seen.kept
    assert dry.cache_bytes(paged=True) == dry.cache_bytes(paged=False) == (3 * 2 * 2 * 16 * 4, 0)


def test_a_dry_run_for_a_gpu_counts_what_fused_layers_keep():
    """Against the tensors that their forward saves, interpreted: neither norms before they are rounded, nor silus."""
    config, settings = tiny_config("llama", hidden=64, layers=3), (PolicyConfig(dtype="float32"), LoraConfig())
    dry = DryRun(config, *settings, on_gpu=True)
    model = LogprobModel(type(dry.model)._from_config(config, attn_implementation=ATTENTION))
    fuse(model.model, None)
    kept = dry.training(micro_batch(2, 48)).kept
    assert kept == pytest.approx(saved(model), rel=0.1)
    assert kept < 0.8 * DryRun(config, *settings).training(micro_batch(2, 48)).kept


def test_only_adapters_are_trained_of_an_adapted_model():
    config = tiny_config("qwen2", hidden=64)
    train = recipe(lora=LoraConfig(rank=4, target_modules=["q_proj"]))
    sizes = measure(train, config, batch_plan(train, 1), 16, on_gpu=False)
    assert sizes.trained == 2 * (4 * 64 + 64 * 4)
    assert sizes.parameters > 20 * sizes.trained


def test_what_goes_into_layers_is_counted_where_it_waits():
    config, micro = tiny_config("llama", layers=6), micro_batch(2, 128)
    policies = [PolicyConfig(dtype="float32", gradient_checkpointing=how) for how in (True, "offload")]
    kept, moved = (DryRun(config, policy, LoraConfig(), on_gpu=True).training(micro) for policy in policies)
    inputs = 6 * micro.input_ids_bS.numel() * 32 * 4
    assert kept.hosted == 0 and inputs <= moved.hosted < 1.3 * inputs
    assert moved.kept == pytest.approx(kept.kept - moved.hosted, rel=0.05)


def test_experts_are_counted_as_often_as_a_token_goes_to_them():
    dry = DryRun(tiny_config("qwen3_moe"), PolicyConfig(dtype="float32"), LoraConfig())
    whole = sum(p.numel() for name, p in dry.model.named_parameters() if ".experts." in name)
    rest = sum(p.numel() for name, p in dry.model.named_parameters() if ".experts." not in name)
    embedding = dry.model.get_input_embeddings().weight.numel()
    assert dry.active_parameters() == whole // 2 + rest - embedding
    assert dry.training(micro_batch(2, 16)).kept > 0


def test_a_model_whose_code_needs_data_is_told_apart(monkeypatch):
    dry = DryRun(tiny_config("llama"), PolicyConfig(dtype="float32"), LoraConfig())
    forward = dry.model.base_model.forward

    def peeks(*args, **kwargs):
        out = forward(*args, **kwargs)
        assert out.last_hidden_state.sum().item() < 1
        return out

    monkeypatch.setattr(dry.model.base_model, "forward", peeks)
    with pytest.raises(NeedsData):
        dry.training(micro_batch(1, 8))


@pytest.mark.parametrize("architecture", ["qwen3", "deepseek_v3", "gemma3n_text"])
@pytest.mark.parametrize(("recomputes", "rank", "on_gpu"), [(True, 0, True), ("offload", 4, False)])
def test_models_of_like_layers_are_measured_by_two_and_three_of_them(
    architecture, recomputes, rank, on_gpu, monkeypatch
):
    config, lora = tiny_config(architecture, layers=12), LoraConfig(rank=rank)
    # In 3 layers the gradients of the embeddings take most, and in 12 what is computed again.
    config.vocab_size, config.tie_word_embeddings = 1000, True
    policy = PolicyConfig(dtype="bfloat16", gradient_checkpointing=recomputes)
    rollout = RolloutConfig(prompts_per_step=1, num_generations=2, max_completion_tokens=24)
    train = TrainConfig(policy=policy, lora=lora, rollout=rollout)
    batch, ran, peaks = batch_plan(train, 1), [], DryRun.peaks

    def noted(dry, micro):
        ran.append(dry.model.config.num_hidden_layers)
        return peaks(dry, micro)

    monkeypatch.setattr(DryRun, "peaks", noted)
    seen = measure(train, config, batch, 12, on_gpu=on_gpu)
    assert ran == ([4] if architecture == "gemma3n_text" else [2, 3]), "which has layers of several kinds"
    dry = DryRun(config, policy, lora, on_gpu=on_gpu)
    micro = largest_micro_batch(train, batch, 12, packs=dry.packs, on_gpu=on_gpu)
    assert seen.training == dry.training(micro) and seen.parameters == dry.parameters()
    assert (seen.token_bytes, seen.state_bytes) == dry.cache_bytes(paged=True)
    assert seen.reading == -(-dry.reading(micro) // micro.input_ids_bS.numel())


def test_a_smaller_micro_batch_is_planned_without_another_dry_run():
    """A dry run of 7B takes seconds; what it says of a micro-batch is close enough for one of an eighth."""
    config = tiny_config("qwen2", hidden=64, layers=3)
    rollout = RolloutConfig(prompts_per_step=8, num_generations=2, max_completion_tokens=64)
    seen = []
    for tokens in (1024, 128):
        train = recipe(dtype="float32", rollout=rollout)
        train = replace(train, policy=replace(train.policy, micro_batch_tokens=tokens, gradient_checkpointing=True))
        seen.append(measure(train, config, batch_plan(train, 1), 64, on_gpu=False))
    large, small = seen
    assert large.tokens > 5 * small.tokens
    scaled = large.of_tokens(small.tokens, 4).training
    for name in ("kept", "head", "layers"):
        ours, real = getattr(scaled, name), getattr(small.training, name)
        assert 0.97 * real <= ours <= 1.1 * real + 4 * large.largest, (name, scaled, small.training)
