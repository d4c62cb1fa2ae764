import pytest
import torch
from tiny_models import ARCHITECTURES, build, tiny_config
from transformers import AutoConfig

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.generation.cache import Geometry, PagedCache
from hybrid_grpo.model.attention import ATTENTION


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_geometry_is_that_of_what_a_forward_of_transformers_caches(architecture):
    config = tiny_config(architecture)
    with torch.no_grad():
        kept = build(config)(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).past_key_values
    seen = Geometry.of(build(config, ATTENTION))
    assert len(seen.shapes) == len(kept.layers) == 2
    for (key, value), layer in zip(seen.shapes, kept.layers, strict=True):
        assert key == (layer.keys.shape[1], layer.keys.shape[3])
        assert value == (layer.values.shape[1], layer.values.shape[3])
    assert seen.token_bytes == sum(4 * (layer.keys.numel() + layer.values.numel()) for layer in kept.layers)


def test_attention_over_other_keys_than_are_cached_is_refused():
    """JetMoe repeats its keys between the two."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8}
    config = AutoConfig.for_model("jetmoe", vocab_size=61, intermediate_size=16, num_local_experts=2, **sizes)
    model = build(config, ATTENTION)
    with pytest.raises(UserError, match=r"policy\.model: JetMoe.*caches: set rollout\.decoder: transformers$"):
        Geometry.of(model)


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
    taken = cache.take(3)
    assert 0 not in taken and cache.free == 1
    cache.share(taken[:2])
    cache.give_back(taken)
    assert cache.free == 2
    cache.give_back(taken[:2])
    assert cache.free == 4 and cache.peak == 3
    for misuse in (lambda: cache.give_back(taken[:1]), lambda: cache.share(taken[:1]), lambda: cache.take(5)):
        with pytest.raises(AssertionError):
            misuse()
