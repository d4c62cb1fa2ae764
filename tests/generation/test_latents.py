"""Layers that cache latents: pages hold those alone, and decoding attends to them as if they had been expanded."""

import random
from functools import partial

import pytest
import torch
from decoders import generate
from scripted_turns import Scripted, logp_of_training
from tiny_architectures import tiny_architecture
from tiny_models import VOCABULARY, build
from torch import nn

from hybrid_grpo.generation import Request, Sampling, stream_key
from hybrid_grpo.generation.paged_attention import masked_attention
from hybrid_grpo.generation.shape_probe import geometry_of
from hybrid_grpo.model.attention import ATTENTION, absorbed
from hybrid_grpo.model.ragged_attention import Options

TYPES = ["deepseek_v3", "glm4_moe_lite"]


def latent_model(kind, attention=ATTENTION):
    return build(tiny_architecture(kind), attention)


@pytest.mark.parametrize("kind", TYPES)
def test_pages_hold_latents_and_no_keys(kind):
    view = latent_model(kind)
    config, geometry = view.config, geometry_of(view)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert geometry.latents
    assert geometry.shapes == (((1, width), (1, 0)),) * config.num_hidden_layers
    layers, chosen, _ = geometry.experts
    assert geometry.token_bytes == 4 * width * config.num_hidden_layers + layers * chosen


@pytest.mark.parametrize("kind", TYPES)
def test_turns_over_latents_are_those_of_a_forward_over_all_that_was_read(kind):
    """Prompts read in parts, answers behind what is cached, and too few pages for all."""
    plain, view = latent_model(kind, "eager"), latent_model(kind)
    chance = random.Random(0)
    vocabulary = min(VOCABULARY, view.config.vocab_size)
    prompts = [[chance.randrange(vocabulary) for _ in range(n)] for n in (1, 70, 5)]
    requests = [
        Request(ids, [stream_key(row, k) for k in range(3)], max_total_tokens=200) for row, ids in enumerate(prompts)
    ]
    few = 10 * 32 * geometry_of(view).token_bytes / 2**30
    given = {"max_slots": 5, "cache_gb": few, "prefill_tokens": 32, "turns": Scripted(4, (0, 5)), "decode": str}
    groups, stats = generate(view, requests, Sampling(120, stop_ids=tuple(range(vocabulary // 25))), **given)
    assert stats.answers > 3 and stats.preempted
    for ids, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert completion.logp == pytest.approx(logp_of_training(plain, ids, completion), abs=1e-4)


@pytest.mark.parametrize("window", [0, 3])
def test_absorbed_attention_is_that_over_expanded_keys_and_values(window):
    n, heads, entries, nope, rope, rank, value = 3, 4, 9, 8, 6, 10, 5
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)

    class Layer(nn.Module):
        qk_nope_head_dim, kv_lora_rank = nope, rank
        kv_b_proj = nn.Linear(rank, heads * (nope + value), bias=False, dtype=torch.float64)

    layer = Layer()
    query, latents = draw(n, heads, 1, nope + rope), draw(n, 1, entries, rank + rope)
    position, options = torch.tensor([[8], [0], [5]]), Options(0.3, window)
    attend = partial(masked_attention, position_nq=position, options=options)
    expanded = layer.kv_b_proj(latents[..., :rank]).view(n, entries, heads, -1).transpose(1, 2)
    keys = torch.cat([expanded[..., :nope], latents[..., rank:].expand(-1, heads, -1, -1)], dim=-1)
    expected = attend(query, keys, expanded[..., nope:].contiguous())
    torch.testing.assert_close(absorbed(query, latents, layer, attend), expected)


def test_a_product_that_is_more_than_a_weight_keeps_its_keys_and_values():
    """An adapter, for instance: the product is then called, not read."""
    view = latent_model("deepseek_v3")
    for layer in view.model.layers:
        layer.self_attn.kv_b_proj = nn.Sequential(layer.self_attn.kv_b_proj)
    assert not geometry_of(view).latents
