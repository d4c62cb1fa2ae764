import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from decoders import generate
from scripted_turns import Scripted
from tiny_models import ARCHITECTURES, STATES, WINDOW, build, tiny_config

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.generation import Request, Sampling, state_pool, stream_key
from hybrid_grpo.generation import cache as cache_module
from hybrid_grpo.generation.cache import Geometry, PagedCache, cache_for
from hybrid_grpo.generation.shape_probe import MemoryTracker, geometry_of
from hybrid_grpo.generation.state_pool import StatePool, StateShape
from hybrid_grpo.model import attention
from hybrid_grpo.model.attention import ATTENTION, Segments
from hybrid_grpo.model.gathered_weights import View, meta_copy


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_geometry_is_that_of_what_a_forward_of_transformers_caches(architecture):
    config = tiny_config(architecture)
    with torch.no_grad():
        model = build(config)
        kept = model(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).cache
    seen = geometry_of(build(config, ATTENTION))
    attending = [layer for layer in kept.layers if hasattr(layer, "keys")]
    assert len(kept.layers) == 2 and len(seen.shapes) == len(attending)
    for (key, value), layer in zip(seen.shapes, attending, strict=True):
        assert key == (layer.keys.shape[1], layer.keys.shape[3])
        assert value == (layer.values.shape[1], layer.values.shape[3])
    # A byte for each expert of a token: two in each of two layers; Jamba has one in one layer.
    experts = {"jamba": 1}.get(architecture, 4 if getattr(config, "num_experts_per_tok", 0) else 0)
    assert seen.token_bytes == sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in attending) + experts
    states = {
        (kind, at, index): tuple(state.shape[1:])
        for at, layer in enumerate(kept.layers)
        for kind in ("conv", "recurrent")
        for index, state in getattr(layer, f"{kind}_states", {}).items()
        if state is not None
    }
    assert {(state.kind, state.layer, state.index): state.shape for state in seen.states} == states
    assert bool(states) == (architecture in STATES)


def test_layers_that_share_keys_and_values_have_one_pool_of_pages():
    """Gemma 4: heads of 8 with windows and of 16 without; the last two layers read the pages of the first two."""
    config = tiny_config("gemma4_text")
    seen = geometry_of(build(config, ATTENTION))
    assert seen.layers == (0, 1, 0, 1) and seen.shapes == (((2, 8), (2, 8)), ((1, 16), (1, 16)))
    assert seen.token_bytes == 4 * (2 * 2 * 8 + 2 * 1 * 16)
    assert [options.window for options in seen.attention] == [WINDOW, 0, WINDOW, 0]
    assert len(PagedCache(seen, 2, 4, torch.device("cpu")).keys) == 2


def test_latents_are_stored_once():
    """DeepSeek-V3 caches 8 + 8 numbers for all heads."""
    seen = geometry_of(build(tiny_config("deepseek_v3"), ATTENTION))
    assert seen.shapes == 2 * (((1, 16), (1, 0)),)


def test_attention_over_keys_of_other_tokens_is_refused(monkeypatch):
    """As of compressed keys, one for several tokens."""
    model, routed = build(tiny_config("llama"), ATTENTION), attention.routed_attention

    def compressed(module, query, key, value, *rest, **options):
        return routed(module, query, key[:, :, ::4], value[:, :, ::4], *rest, **options)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, ATTENTION, compressed)
    with pytest.raises(UserError, match=r"policy\.model: Llama.*its tokens: set rollout\.decoder: transformers$"):
        geometry_of(model)


def test_pages_copied_are_whole_and_in_every_layer():
    cache = PagedCache(Geometry((((2, 3), (2, 5)), ((1, 4), (1, 4))), torch.float32), 6, 2, torch.device("cpu"))
    for pool in cache.keys + cache.values:
        pool.copy_(torch.randn(pool.shape))
    before = [pool.clone() for pool in cache.keys + cache.values]
    cache.copy([1, 1, 3], [2, 4, 5])
    for pool, was in zip(cache.keys + cache.values, before, strict=True):
        assert torch.equal(pool, was[[0, 1, 1, 3, 1, 3]])


def test_a_page_is_free_when_its_last_owner_gave_it_back():
    cache = PagedCache(Geometry((((1, 1), (1, 1)),), torch.float32), 5, 2, torch.device("cpu"))
    assert [cache.pages_for(entries) for entries in (0, 1, 2, 3)] == [0, 1, 1, 2]
    taken = cache.allocate(3)
    assert 0 not in taken and cache.free == 1
    cache.share(taken[:2])
    cache.release(taken)
    assert cache.free == 2
    cache.release(taken[:2])
    assert cache.free == 4 and cache.peak == 3
    for misuse in (lambda: cache.release(taken[:1]), lambda: cache.share(taken[:1]), lambda: cache.allocate(5)):
        with pytest.raises(AssertionError):
            misuse()


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt2"])
def test_what_a_prefill_takes_is_measured_in_the_first_forward(architecture):
    config = tiny_config(architecture, hidden=256)
    model = build(config, ATTENTION)
    ids = torch.randint(60, (1, 200))
    batch = Segments([(0, 200)], [(0, 0)], ids.device)
    with torch.no_grad(), MemoryTracker((*model.parameters(), *model.buffers())) as tracker:
        model.base_model(input_ids=ids, position_ids=torch.arange(200)[None], use_cache=False, batch=batch)
    packed = View(model, meta_copy(model, ATTENTION), False, ids.device, weights="int8")
    packed.gather()
    for of in (model, packed.module):
        assert geometry_of(of).reading == pytest.approx(tracker.peak / 200, rel=0.3)


def test_on_a_gpu_the_cache_leaves_room_for_a_prefill_the_logits_and_the_graphs(monkeypatch):
    """It took nine tenths of what was free, whatever a prefill needs."""
    gib, made = 2**30, []
    monkeypatch.setattr(cache_module, "free_bytes", lambda _: 10 * gib)
    monkeypatch.setattr(cache_module, "PagedCache", lambda *given: made.append(given) or SimpleNamespace())
    asked = []

    def beside(slots):
        asked.append(slots)
        return 2 * gib

    def pages_and_prefill(wish, reading, longest):
        geometry = Geometry((((1, 128), (1, 128)),) * 64, torch.bfloat16, (), reading)
        cache = cache_for(geometry, 256, None, torch.device("cuda", 0), wish, beside, longest, 300)
        return made[-1][1], cache.prefill_tokens

    page, many = 256 * 64 * 2 * 128 * 2, [4096] * 300
    assert pages_and_prefill(16384, 2**17, many) == (int(0.95 * (10 - 2 - 2) * gib / page), 16384)
    # By itself a prefill takes a tenth of what is free, or 2,048 tokens.
    assert pages_and_prefill(None, 2**17, many) == (int(0.95 * (10 - 1 - 2) * gib / page), 8192)
    assert pages_and_prefill(None, 2**20, many)[1] == 2048
    assert pages_and_prefill(16384, 2**17, [1024]) == (4 + 1 + 2, 16384), "as many pages as are needed"
    assert asked[0] == 300
    with pytest.raises(UserError, match=r"^rollout\.cache_gb: 0 GiB hold 0 tokens"):
        pages_and_prefill(131072, 2**17, many)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3_moe", "qwen3_next"])
def test_a_call_leaves_no_cache_to_the_garbage_collector(architecture, turns, by, monkeypatch):
    """On a GPU that would be gigabytes, until it runs. What the call returns does not hold it either."""
    made = []
    init = PagedCache.__init__

    def watched(self, *given, **named):
        made.append(weakref.ref(self))
        init(self, *given, **named)

    monkeypatch.setattr(PagedCache, "__init__", watched)
    model = build(tiny_config(architecture), ATTENTION).eval()
    requests = [Request([5, 1, 3], [stream_key(0, 0, k) for k in range(2)], max_total_tokens=40 if turns else None)]
    gc.collect()
    gc.disable()
    try:
        groups, _ = generate(model, requests, Sampling(6), turns=Scripted(2) if turns else None)
        assert groups[0][0].token_ids
        assert made and not [cache for cache in made if cache() is not None]
    finally:
        gc.enable()


def test_rows_of_states_are_copied_in_parts_and_put_back_to_zero(monkeypatch):
    shapes = [(2, 3), (4,), (2, 3), (5,)]
    states = tuple(StateShape("conv", layer, 0, shape, torch.float32) for layer, shape in enumerate(shapes))
    pool = StatePool(states, 3, 8, torch.device("cpu"))
    before = [torch.randn(8, *shape) for shape in shapes]
    for state, numbers in zip(states, before, strict=True):
        pool.of("conv", state.layer, 0).copy_(numbers)
    monkeypatch.setattr(state_pool, "_COPIED", 48)  # two rows of (5,), one of others
    pool.copy([6, 7, 6], [0, 2, 1])
    pool.zero([3, 5])
    for state, numbers in zip(states, before, strict=True):
        numbers[[0, 2, 1]] = numbers[[6, 7, 6]].clone()
        numbers[[3, 5]] = 0
        assert torch.equal(pool.of("conv", state.layer, 0), numbers)
    assert pool.bytes == sum(numbers.nbytes for numbers in before)
