"""Decode steps with Triton kernels, interpreted: for which models, with what results, and what happens without."""

import gpu_attention
import pytest
import torch
from decoders import generate
from gpu_kernels import DEVICE
from scripted_turns import Scripted
from tiny_architectures import tiny_architecture
from tiny_models import ARCHITECTURES, VOCABULARY, build, pair, tiny_config

from hybrid_grpo.config import LoraConfig, PolicyConfig
from hybrid_grpo.generation import Request, Sampling, loop, paged_attention, stream_key
from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.fused_step import fused_step
from hybrid_grpo.generation.gpu_step import GpuStep
from hybrid_grpo.generation.shape_probe import geometry_of
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.gathered_weights import View, meta_copy
from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.kernels.gpu import launcher
from hybrid_grpo.model.kernels.gpu.attention import paged_attention as attend
from hybrid_grpo.model.loading import load_model
from hybrid_grpo.model.lora import Adapters

pytestmark = pytest.mark.usefixtures("torch_only")


@pytest.fixture
def kernels(monkeypatch):
    """Tensors count as on a GPU, and a double attends, over many entries. Names of the kernels that are launched."""
    launched = []
    monkeypatch.setattr(gpu.attention, "_MOST_SPLITS", 2)  # the interpreter runs one program after the other
    monkeypatch.setattr(gpu.attention, "paged_attention", gpu_attention.paged_attention)

    def launch(kernel, grid, *arguments, **options):
        launched.append(kernel.__name__)
        launcher.launch(kernel, grid, *arguments, **options)

    for module in (launcher, paged_attention):
        monkeypatch.setattr(module, "on_gpu", lambda _: True)
    for module in [module for name in gpu.__all__ if hasattr(module := getattr(gpu, name), "launch")]:
        monkeypatch.setattr(module, "launch", launch)
    return launched


def cache_of(view):
    return PagedCache(geometry_of(view), 2, 4, torch.device(DEVICE))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_a_step_is_fused_where_the_model_is_that_of_llama(architecture, kernels):
    """Fused means that both ways gave the same logits, to 1e-4 of their size: `fused_step` compares them."""
    view = pair(architecture)[1].to(DEVICE)
    step = fused_step(view, cache_of(view))
    assert isinstance(step, GpuStep) == (architecture in ("llama", "mistral", "qwen2", "qwen3"))


@pytest.mark.parametrize("four_bits", [False, True])
def test_adapters_and_weights_in_four_bits_are_multiplied_as_they_are(four_bits, kernels, tmp_path):
    """`fused_step` compares its logits with those of the layers; some layers have no adapter."""
    if four_bits:
        pytest.importorskip("bitsandbytes")
    build(tiny_config("qwen2", 64)).save_pretrained(tmp_path)
    model = load_model(PolicyConfig(model=str(tmp_path), dtype="float32"), ATTENTION, four_bits=four_bits)
    adapters = Adapters(model, LoraConfig(rank=4, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]), seed=1)
    # In evaluation, bitsandbytes would lay weights out anew on a CPU.
    view = View(model, meta_copy(model, ATTENTION), False, torch.device(DEVICE), adapters.by_layer, weights="unmerged")
    view.gather()
    with torch.inference_mode():
        assert isinstance(fused_step(view.module, cache_of(view.module)), GpuStep)
    # At four positions, of 3 and 24 rows by kernels alone; of 66 torch multiplies a plain head and plain gates.
    assert kernels.count("_product") == 4 * (2 * (2 * 7 + 1) + (2 * 7 + 1 if four_bits else 2 * 5))


@torch.inference_mode()
def test_weights_in_eight_bits_are_multiplied_as_they_are(kernels, monkeypatch):
    """By kernels for any number of rows, those on the same input as one; a layer and the head, at four positions."""
    monkeypatch.setattr(gpu.attention, "paged_attention", attend)
    model = build(tiny_config("qwen3", 64, layers=1, max_position_embeddings=8))
    view = View(model, meta_copy(model, ATTENTION), False, torch.device(DEVICE), neighbors=True, weights="int8")
    view.gather()
    assert isinstance(fused_step(view.module, cache_of(view.module)), GpuStep)
    assert kernels.count("_product") == 4 * (2 * (4 + 1) + 4) and "_attend" in kernels


@torch.inference_mode()
def test_a_kernel_with_other_results_or_without_a_compiler_is_left_with_one_warning(kernels, monkeypatch):
    monkeypatch.setattr(gpu.products, "product", lambda x, matrix, out, scratch, **how: out.zero_())
    view = pair("llama")[1].to(DEVICE)
    with pytest.warns(UserWarning, match="decoding LlamaForCausalLM is slower without a Triton kernel: its results"):
        assert fused_step(view, cache_of(view)).most_rows == 0
    monkeypatch.setattr(gpu.norm, "rms_norm", lambda *_: None)
    view = pair("llama")[1].to(DEVICE)
    with pytest.warns(UserWarning, match="decoding LlamaForCausalLM is slower without a Triton kernel: its results"):
        assert fused_step(view, cache_of(view)) is None
    assert fused_step(view, cache_of(view)) is None

    def failing(*_, **__):
        raise RuntimeError("Failed to find C compiler\nPlease specify one")

    monkeypatch.setattr(gpu.norm, "rms_norm", failing)
    view = pair("llama")[1].to(DEVICE)
    with pytest.warns(UserWarning, match="slower without a Triton kernel: Failed to find C compiler$"):
        assert fused_step(view, cache_of(view)) is None


@pytest.mark.parametrize(("architecture", "filters"), [("qwen2", {}), ("qwen3", {"top_k": 20, "top_p": 0.9})])
@torch.inference_mode()
def test_the_decode_loop_with_kernels_is_the_one_without(architecture, filters, kernels, monkeypatch):
    """In bfloat16, on a CPU with attention by a double: the same completions, but for rounding."""
    if DEVICE == "cpu":
        gpu_attention.install(monkeypatch, flash=False)
    model, plain = (build(tiny_config(architecture, layers=1), ATTENTION).to(DEVICE, torch.bfloat16) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(loop, "capture_on", lambda _: None)  # a replay launches nothing by itself
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in (1, 9, 4)]
    requests = [Request(ids, [stream_key(row)]) for row, ids in enumerate(prompts)]

    def logp_of_the_first_tokens(model):
        groups, _ = generate(model, requests, Sampling(4, **filters))
        return {(row, *c.token_ids[: i + 1]): c.logp[i] for row, (c,) in enumerate(groups) for i in range(4)}

    assert isinstance(fused_step(model, PagedCache(geometry_of(model), 2, 256, torch.device(DEVICE))), GpuStep)
    generate(model, requests, Sampling(1, **filters))  # the kernels of all layers are checked, gradients included
    kernels.clear()
    fast = logp_of_the_first_tokens(model)
    expected = {"_sum_weights", "_sample", "_add_norm", "_silu_times", "_product", "_rotate"}
    assert expected | ({"_search"} if filters else set()) == set(kernels) - {"_attend"}
    steps = kernels.count("_sample")
    for module in (launcher, paged_attention):
        monkeypatch.setattr(module, "on_gpu", lambda _: False)
    kernels.clear()
    slow = logp_of_the_first_tokens(plain)
    assert not kernels and steps >= 4
    # Completions part where rounding makes another token come out; until then they are the same.
    same = fast.keys() & slow.keys()
    assert len(same) > 6
    gaps = [abs(fast[key] - slow[key]) for key in same]
    assert max(gaps) < 0.4 and sum(gaps) / len(gaps) < 0.06


@pytest.mark.parametrize("architecture", ["gpt_oss", "glm4_moe_lite"])
@torch.inference_mode()
def test_turns_with_the_kernel_for_pages_are_those_without(architecture, kernels, monkeypatch):
    """Windows, sinks and latents, in float32; answers between turns are read by the kernel too."""
    latent = architecture == "glm4_moe_lite"
    model = build(tiny_architecture(architecture) if latent else tiny_config(architecture), ATTENTION).to(DEVICE)
    requests = [
        Request([5, 1, 3], [stream_key(0)], max_total_tokens=40),
        Request([2] * 9, [stream_key(1)], max_total_tokens=40),
    ]

    def completions():
        turns = Scripted(3)
        [[one], [other]], stats = generate(model, requests, Sampling(8, stop_ids=tuple(range(0, 40, 2))), turns=turns)
        assert stats.answers
        return [(c.token_ids, c.observations) for c in (one, other)], torch.tensor([*one.logp, *other.logp])

    monkeypatch.setattr(loop, "capture_on", lambda _: None)
    for module in (launcher, paged_attention):
        monkeypatch.setattr(module, "on_gpu", lambda _: False)
    expected_tokens, expected_logp = completions()
    assert "_attend" not in kernels
    monkeypatch.setattr(paged_attention, "on_gpu", lambda _: True)
    monkeypatch.setattr(gpu.attention, "paged_attention", attend)
    tokens, logp = completions()
    assert kernels.count("_attend") > 20
    assert tokens == expected_tokens
    torch.testing.assert_close(logp, expected_logp, rtol=0, atol=2e-5)


@pytest.mark.parametrize("architecture, steps", [
    ("lfm2", {"_convolve"}), ("qwen3_next", {"_convolve", "_delta"}), ("falcon_h1", {"_convolve", "_mamba"}),
    ("jamba", {"_convolve", "_mamba"}),
])  # fmt: skip
@torch.inference_mode()
def test_states_by_kernels_are_those_of_torch(architecture, steps, kernels, monkeypatch):
    """In float32, with turns that go on from a kept state, and slots that sequences leave."""
    fast, plain = (build(tiny_config(architecture), ATTENTION).to(DEVICE) for _ in range(2))
    keys = [stream_key(0, k) for k in range(2)]
    requests = [
        Request([5, 1, 3], keys, limits=[2, 3], max_total_tokens=24),
        Request([2] * 6, [1], max_total_tokens=24),
    ]
    monkeypatch.setattr(gpu.attention, "_MOST_SPLITS", 2)  # the interpreter runs one program after the other
    monkeypatch.setattr(loop, "capture_on", lambda _: None)

    def completions(model):
        turns, sampling = Scripted(2), Sampling(6, stop_ids=tuple(range(0, 40, 2)))
        groups, stats = generate(model, requests, sampling, turns=turns, max_slots=2)
        assert stats.answers
        every = [c for group in groups for c in group]
        return [(c.token_ids, c.observations) for c in every], torch.tensor([logp for c in every for logp in c.logp])

    tokens, logp = completions(fast)
    assert steps == set(kernels) & {"_convolve", "_delta", "_mamba"}
    for module in (launcher, paged_attention):
        monkeypatch.setattr(module, "on_gpu", lambda _: False)
    kernels.clear()
    expected_tokens, expected_logp = completions(plain)
    assert not kernels and tokens == expected_tokens
    torch.testing.assert_close(logp, expected_logp, rtol=0, atol=2e-5)
