import subprocess
import time
import warnings
from copy import deepcopy
from itertools import chain

import pytest
import torch
from tiny_models import ARCHITECTURES, MORE_ATTENTION, STATES, VOCABULARY, build, in_full, pair, tiny_config
from torch import nn

from hybrid_grpo.config import LoraConfig, PolicyConfig
from hybrid_grpo.generation import GREEDY, Request, Sampling, decoder, generate
from hybrid_grpo.generation.cache import Geometry, PagedCache, Rows, cached_forward
from hybrid_grpo.generation.cpu_step import CpuStep
from hybrid_grpo.generation.fused_step import fused_step
from hybrid_grpo.generation.paged_attention import DecodeStep, Prefill, masked_attention
from hybrid_grpo.generation.sampler import Sampler
from hybrid_grpo.generation.shape_probe import geometry_of
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.eight_bits import Int8Linear, unpacked
from hybrid_grpo.model.gathered_weights import View, meta_copy
from hybrid_grpo.model.kernels import build as kernels
from hybrid_grpo.model.kernels import decoding
from hybrid_grpo.model.loading import load_model
from hybrid_grpo.model.lora import Adapters
from hybrid_grpo.model.ragged_attention import Options

needs_compiler = pytest.mark.skipif(kernels.load() is None, reason="needs a C compiler")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 12, 13, 64, 131])
@pytest.mark.parametrize(("inner", "outer"), [(16, 4), (40, 33), (7, 3), (256, 70), (33, 128)])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_linear_is_the_matrix_product(rows, inner, outer, bias):
    module = nn.Linear(inner, outer, bias=bias)
    x = random(rows, inner)
    expected = nn.functional.linear(x.double(), module.weight.double(), module.bias.double() if bias else None)
    out = decoding._linear(module, x)
    assert torch.allclose(out.double(), expected, atol=1e-5)
    alone = torch.cat([decoding._linear(module, x[i : i + 1]) for i in range(rows)])
    assert torch.equal(out, alone), "a row has the same result in any batch"


@needs_compiler
@torch.no_grad()
def test_products_are_not_much_slower_than_those_of_torch():
    """With more sums than the processor has registers for, they took fourteen times as long."""
    module, x = nn.Linear(256, 1024, bias=False), random(128, 256)

    def seconds(product):
        times = []
        for _ in range(9):
            start = time.process_time()
            for _ in range(5):
                product()
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(lambda: decoding._linear(module, x)) < 4 * seconds(lambda: nn.functional.linear(x, module.weight))


@needs_compiler
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [8, 32, 100])
def test_norms_of_either_kind_are_recognized_and_others_left(offset, size):
    class SomeRMSNorm(nn.Module):
        def __init__(self, power):
            super().__init__()
            self.weight, self.eps, self.power = nn.Parameter(random(size, seed=1)), 1e-5, power

        def forward(self, x):
            return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() ** self.power * (self.weight + offset)

    with torch.no_grad():
        norm, x = SomeRMSNorm(1), random(3, 2, size)
        assert decoding.norm_offset(norm) == offset
        assert torch.allclose(decoding._rms_norm(norm, offset, x), norm(x), atol=1e-5)
        assert decoding.norm_offset(SomeRMSNorm(2)) is None


@needs_compiler
@pytest.mark.parametrize(("heads", "kv", "d"), [(4, 2, 16), (3, 3, 20), (8, 1, 64), (4, 4, 80), (6, 2, 7)])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_pages_is_that_over_the_sequence(heads, kv, d, window, softcap, has_sinks, dtype):
    page, lengths = 4, [1, 4, 5, 19, 8]
    n = len(lengths)
    cache = PagedCache(Geometry((((kv, d), (kv, d)),), dtype), 40, page, torch.device("cpu"))
    order = (torch.randperm(39, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    table = torch.zeros(n, 6, dtype=torch.int32)
    keys, values = (random(n, kv, 24, d, seed=seed).to(dtype) for seed in (1, 2))
    for row, length in enumerate(lengths):
        for place in range(-(-length // page)):
            table[row, place] = order.pop()
        for entry in range(length - 1):
            at = table[row, entry // page], entry % page
            cache.keys[0][at], cache.values[0][at] = keys[row, :, entry], values[row, :, entry]
    position = torch.tensor(lengths) - 1
    query = random(n, heads, 1, d, seed=3).to(dtype)
    new = [torch.stack([t[row, :, i] for row, i in enumerate(position)])[:, :, None] for t in (keys, values)]
    batch = DecodeStep(cache, Rows(position, table, position, 6))
    options = Options(0.3, window, softcap, 3 * random(heads, seed=4) if has_sinks else None)
    out = batch.attend(query, *new, options)
    expected = masked_attention(query.float(), keys.float(), values.float(), position[:, None], options)
    assert out.dtype == dtype and torch.allclose(out.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.02)
    last = [(table[row, i // page], i % page) for row, i in enumerate(position)]
    assert all(torch.equal(cache.keys[0][at], new[0][row, :, 0]) for row, at in enumerate(last))


@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(0, 0.0, False), (5, 0.0, True), (0, 3.0, False)])
def test_what_is_read_behind_the_cache_attends_to_it(by, window, softcap, has_sinks):
    """Sequences of which a part, or nothing, is in the cache, in one forward."""
    heads, kv, d, starts, lengths = 4, 2, 16, [3, 0, 9, 4], [2, 5, 1, 6]
    cache = PagedCache(Geometry((((kv, d), (kv, d)),), torch.float32), 40, 4, torch.device("cpu"))
    ends = [start + new for start, new in zip(starts, lengths, strict=True)]
    pages = [cache.allocate(cache.pages_for(end)) for end in ends]
    query, keys, values = (random(4, h, 12, d, seed=seed) for seed, h in enumerate((heads, kv, kv)))
    options, expected = Options(0.3, window, softcap, 3 * random(heads, seed=4) if has_sinks else None), []
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        for entry in range(start):
            at = pages[row][entry // 4], entry % 4
            cache.keys[0][at], cache.values[0][at] = keys[row, :, entry], values[row, :, entry]
        whole = (t[row : row + 1, :, :end] for t in (keys, values))
        place = torch.arange(start, end)[None]
        expected.append(masked_attention(query[row : row + 1, :, start:end], *whole, place, options))
    packed = [
        torch.cat([t[row, :, start:end] for row, (start, end) in enumerate(zip(starts, ends, strict=True))], 1)[None]
        for t in (query, keys, values)
    ]
    batch = Prefill(cache, pages, starts, lengths)
    out = batch.attend(*packed, options)
    assert torch.allclose(out, torch.cat(expected, 1), atol=1e-5)


def cache_of(view):
    return PagedCache(geometry_of(view), 3, 32, torch.device("cpu"))


@needs_compiler
@pytest.mark.parametrize("architecture", ARCHITECTURES + MORE_ATTENTION)
def test_a_step_is_fused_where_the_model_is_that_of_llama(architecture):
    view = pair(architecture)[1]
    with torch.inference_mode():
        taken = fused_step(view, cache_of(view))
    assert (taken is not None) == (architecture in ("llama", "mistral", "qwen2", "qwen3"))


@needs_compiler
@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize(("architecture", "hidden"), [("qwen3", 32), ("llama", 48), ("mistral", 128), ("qwen2", 128)])
@torch.inference_mode()
def test_a_step_in_bfloat16_is_that_of_its_weights_in_float32(architecture, hidden, tiled):
    """By AMX or AVX512_BF16, where the processor has them and widths are multiples of 32, and without."""
    wide = build(tiny_config(architecture, hidden), ATTENTION)
    half = deepcopy(wide).bfloat16()
    wide.load_state_dict(half.state_dict())
    n, found = 37, []
    table = torch.arange(1, n + 1, dtype=torch.int32)[:, None]
    for view in (half, wide):
        cache = PagedCache(geometry_of(view), n + 1, 32, torch.device("cpu"))
        step = fused_step(view, cache)
        assert step is not None
        step._tiled *= tiled
        for at in range(3):
            position = torch.full((n,), at)
            rows = Rows((position * 7 + torch.arange(n)) % VOCABULARY, table, position, 1, position)
            found.append(step(rows).clone())
            alone = step(Rows(*(tensor[-1:] for tensor in rows[:3]), 1, position[-1:]))
            assert torch.equal(alone, found[-1][-1:]), "a row has the same result in any batch"
    for ours, exact in zip(found[:3], found[3:], strict=True):
        assert (ours - exact).square().mean().sqrt() < 0.02 * exact.std()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_weights_in_four_bits_are_multiplied_as_the_same_numbers_in_full(dtype, tmp_path):
    """To the bit, in strips of 32 columns and in what is left of them; with adapters, which only some layers have."""
    pytest.importorskip("bitsandbytes")
    config = tiny_config("qwen2", 192)
    build(config).save_pretrained(tmp_path)
    settings = PolicyConfig(model=str(tmp_path), dtype=str(dtype).removeprefix("torch."))
    packed = load_model(settings, ATTENTION, four_bits=True)
    lora, logits = LoraConfig(rank=4, target_modules=["q_proj", "down_proj"]), []
    for model in (packed, in_full(packed)):
        adapters = Adapters(model, lora, seed=1)
        for adapter in adapters.by_layer.values():
            adapter.up.data.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
        cpu, module = torch.device("cpu"), meta_copy(model, ATTENTION)
        (view := View(model, module, False, cpu, adapters.by_layer, weights="unmerged")).gather()
        cache = PagedCache(geometry_of(view.module), 8, 4, cpu, 7, 7)
        step = fused_step(view.module, cache)
        assert isinstance(step, CpuStep)
        rows = Rows(
            torch.arange(7), torch.arange(1, 8, dtype=torch.int32)[:, None], torch.zeros(7, dtype=torch.long), 1
        )
        logits.append(step(rows).clone())
    assert torch.equal(*logits) and logits[0].std() > 0.1


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_weights_in_eight_bits_are_multiplied_as_the_same_numbers_in_full(dtype):
    """To the bit, of few rows, for which few columns are unpacked at a time, and of more."""
    model, cpu = build(tiny_config("qwen3", 192)).to(dtype), torch.device("cpu")
    (view := View(model, meta_copy(model, ATTENTION), False, cpu, weights="int8")).gather()
    full = deepcopy(model)
    for path, linear in full.named_modules():
        if isinstance(rounded := view.module.get_submodule(path), Int8Linear):
            linear.weight.copy_(unpacked(rounded.weight))
    (plain := View(full, meta_copy(full, ATTENTION), False, cpu)).gather()
    for n in (1, 7, 13, 40):
        logits = []
        for module in (view.module, plain.module):
            cache = PagedCache(geometry_of(module), n + 1, 4, cpu, n, n)
            step = fused_step(module, cache)
            assert isinstance(step, CpuStep)
            table = torch.arange(1, n + 1, dtype=torch.int32)[:, None]
            logits.append(step(Rows(torch.arange(n), table, torch.zeros(n, dtype=torch.long), 1)).clone())
        assert torch.equal(*logits) and logits[0].std() > 0.1


@needs_compiler
@torch.inference_mode()
def test_rounding_in_many_layers_does_not_keep_a_step_from_being_fused():
    """Through all of them it moves logits by as much as another formula would."""
    view = build(tiny_config("llama", 128, layers=40), ATTENTION).bfloat16()
    for layer in view.model.layers:
        layer.self_attn.q_proj.weight *= 3
    assert fused_step(view, cache_of(view)) is not None


@needs_compiler
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES + MORE_ATTENTION if a not in STATES])
@torch.inference_mode()
def test_what_is_read_in_less_time_is_what_a_whole_forward_stores(architecture):
    """A forward that ends with the last keys and values, and the kernel: texts in two parts, some of one token."""
    view, generator = pair(architecture)[1], torch.Generator().manual_seed(1)
    geometry = geometry_of(view)
    whole, early, short = (PagedCache(geometry, 16, 8, torch.device("cpu")) for _ in range(3))
    fused, pages = fused_step(view, short), [[1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12]]
    for begins, ends in (((0, 0, 0, 0), (9, 20, 1, 8)), ((9, 20, 1, 8), (24, 21, 16, 19))):
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        ids = torch.randint(VOCABULARY, (sum(lengths),), generator=generator)
        batches = [Prefill(cache, pages, list(begins), lengths) for cache in (whole, early)]
        cached_forward(view.base_model, ids[None], batches[0].position_1N, batches[0])
        batches[1].read(view.base_model, ids[None], batches[1].position_1N)
        if fused is not None:
            step = decoder.Decoder(view, short, Sampling(1), 1, 4)
            assert step.prefill(pages, list(begins), [part.tolist() for part in ids.split(lengths)])
    for stored, expected in zip(early.keys + early.values, whole.keys + whole.values, strict=True):
        assert torch.equal(stored, expected) and (expected.any() or not expected.numel())
    for stored, expected in zip(short.keys + short.values, whole.keys + whole.values, strict=True):
        assert fused is None or torch.allclose(stored, expected, atol=1e-5)


def with_delta_nets(**changes):
    """A model like Qwen3.5: gated attention, a rotation of a part of each head, norms that add 1 to their weight."""
    sizes = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    sizes |= {"linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    return build(tiny_config("qwen3_5_text", layers=3, **(sizes | changes)), ATTENTION)


@needs_compiler
def test_a_step_with_delta_nets_is_fused_and_gives_the_tokens_of_its_modules(monkeypatch):
    view = with_delta_nets()
    with torch.inference_mode():
        step = fused_step(view, PagedCache(geometry_of(view), 3, 32, torch.device("cpu"), 2, 4))
        assert step is not None
        requests = [Request([5, 6, 7, 8], [1, 2, 3], limits=[40, 3, 17]), Request([9], [4, 5], limits=[9, 25])]
        fused = generate(view, requests, Sampling(max_tokens=40), max_slots=3)[0]
        monkeypatch.setattr(decoder, "fused_step", lambda *_: None)
        plain = generate(view, requests, Sampling(max_tokens=40), max_slots=3)[0]
    for one, other in zip(chain(*fused), chain(*plain), strict=True):
        assert one.token_ids == other.token_ids
        assert one.logp == pytest.approx(other.logp, abs=1e-4)


@needs_compiler
@pytest.mark.parametrize("changed", ["linear_attn.norm", "linear_attn.conv1d", "self_attn"])
def test_delta_nets_that_compute_something_else_are_left_alone(changed):
    view = with_delta_nets()
    for layer in view.model.layers:
        part = dict(layer.named_modules()).get(changed)
        if part is not None and changed != "linear_attn.conv1d":
            own = part.forward
            part.forward = lambda *given, own=own, **more: louder(own(*given, **more))
        elif part is not None:
            layer.linear_attn.activation = "gelu"
    with torch.inference_mode():
        assert fused_step(view, PagedCache(geometry_of(view), 3, 32, torch.device("cpu"), 2, 4)) is None


def louder(found):
    return (found[0] * 1.01, *found[1:]) if isinstance(found, tuple) else found * 1.01


@needs_compiler
@pytest.mark.parametrize("place", ["residual", "far", "embedding", "head"])
def test_a_model_that_only_looks_like_llama_is_left_alone(place):
    view = pair("llama")[1]
    layer = view.model.layers[1]
    own = type(layer.mlp).forward

    def other(self, x):
        return own(self, x) * 1.01

    def far_other(self, x):
        return own(self, x) * (1.01 if self.positions() > 100 else 1.0)

    if place == "residual":
        layer.mlp.forward = other.__get__(layer.mlp)
    elif place == "embedding":
        view.model.embed_tokens.register_forward_hook(lambda *arguments: arguments[-1] * 1.01)
    elif place == "head":
        view.lm_head.register_forward_hook(lambda *arguments: arguments[-1] * 1.01)
    else:
        seen = []
        view.model.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(int(kwargs["position_ids"].max())), with_kwargs=True
        )
        layer.mlp.positions = lambda: seen[-1]
        layer.mlp.forward = far_other.__get__(layer.mlp)
    with torch.inference_mode():
        assert fused_step(view, cache_of(view)) is None


@needs_compiler
def test_a_rotation_that_looks_at_the_whole_batch_is_not_fused():
    view = pair("llama")[1]
    view.model.rotary_emb.rope_type = "dynamic"
    with torch.inference_mode():
        assert fused_step(view, cache_of(view)) is None


@needs_compiler
@pytest.mark.parametrize("temperature", [GREEDY, 0.7, 1.0])
@pytest.mark.parametrize("vocabulary", [1, 7, 64, 65, 1000])
def test_tokens_drawn_by_the_kernel_are_those_of_torch(temperature, vocabulary):
    n = 500
    logits, keys = 3 * random(n, vocabulary), torch.arange(n) * 2**40 - 7
    counters = torch.arange(n) % 9
    token, logp = decoding.sample(logits, keys, counters, temperature)
    # A bias of 0 changes nothing, but takes torch's way.
    expected, expected_logp = Sampler(Sampling(1, temperature, logit_bias=((0, 0.0),)))(logits, keys, counters)
    same = token == expected
    # Where the number drawn falls on the border of two tokens, the last digit of a sum decides.
    assert same.float().mean() > 0.99
    assert torch.allclose(logp[same], expected_logp[same], atol=2e-6)
    assert torch.allclose(
        logp, (logits / (temperature or 1.0)).log_softmax(-1).gather(1, token[:, None])[:, 0], atol=2e-6
    )


def test_without_a_compiler_it_says_so_once_and_decodes_the_same(monkeypatch):
    requests = [Request([1, 2, 3], [5, 6]), Request([7], [8])]
    with_kernels, _ = generate(pair("qwen3")[1], requests, Sampling(12, temperature=GREEDY))
    kernels.load.cache_clear()
    monkeypatch.setattr(kernels.shutil, "which", lambda _: None)
    try:
        with pytest.warns(UserWarning, match="no C compiler") as seen:
            view = pair("qwen3")[1]
            without, _ = generate(view, requests, Sampling(12, temperature=GREEDY))
            generate(view, requests, Sampling(2))
        assert len(seen) == 1
    finally:
        kernels.load.cache_clear()
    for group, other in zip(without, with_kernels, strict=True):
        for mine, theirs in zip(group, other, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.logp == pytest.approx(theirs.logp, abs=2e-5)


@pytest.mark.process
def test_a_source_that_does_not_compile_is_a_warning_with_the_reason(monkeypatch, tmp_path):
    (tmp_path / "wrong.c").write_text("this is no C\n")
    monkeypatch.setattr(kernels, "_SOURCES", [*kernels._SOURCES, tmp_path / "wrong.c"])
    monkeypatch.setenv("HYBRID_GRPO_CACHE", str(tmp_path / "cache"))
    kernels.load.cache_clear()
    try:
        if kernels.shutil.which("cc"):
            with pytest.warns(UserWarning, match="do not compile.*error"):
                assert kernels.load() is None
        assert not list((tmp_path / "cache").glob("*.so"))
    finally:
        kernels.load.cache_clear()


@needs_compiler
def test_the_process_keeps_its_denormal_numbers():
    kernels.load()
    assert torch.tensor(1e-40).mul(1.0).item() != 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernels.load()


@pytest.mark.process
@needs_compiler
def test_kernels_are_compiled_once_into_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HYBRID_GRPO_CACHE", str(tmp_path))
    compiler = kernels.shutil.which("cc") or kernels.shutil.which("gcc") or kernels.shutil.which("clang")
    first = kernels._compiled(compiler)
    monkeypatch.setattr(subprocess, "run", None)
    assert kernels._compiled(compiler) == first and list(tmp_path.iterdir()) == [first]
