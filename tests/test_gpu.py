"""What only a GPU can show; the same programs as on the CPU."""

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from decoders import tokens
from launching import make_task, ranks
from reward_models import make_reward_model
from tiny_models import VOCABULARY, build, tiny_config

from hybrid_grpo.data.packing import pack
from hybrid_grpo.generation import (
    GREEDY,
    Request,
    Sampling,
    Workspace,
    categorical,
    decoder,
    generate,
    graphs,
    paged_attention,
    stream_key,
)
from hybrid_grpo.generation import loop as loops
from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.categorical import ONE, UNIT, Filters
from hybrid_grpo.generation.fused_step import fused_step
from hybrid_grpo.generation.gpu_step import GpuStep
from hybrid_grpo.generation.paged_attention import has_kernel
from hybrid_grpo.generation.shape_probe import geometry_of
from hybrid_grpo.model import layers, softmax
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.kernels.gpu import norm
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.ragged_attention import Options, has_ragged_kernel
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.rewards.models.reward_model import reward_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LIMIT = 24
STOPS = (4, 9)
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
"""Keys and values, layers, heads, head_dim, float32: of `view("qwen2")`."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def captures(monkeypatch):
    """One entry for every graph that was captured."""
    done = []

    real = decoder.on_cuda

    def counted(step, pool=None):
        captured = real(step, pool)
        # Not the step, which would keep its decoder.
        done.append(True)
        return captured

    monkeypatch.setattr(decoder, "on_cuda", counted)
    return done


def view(architecture, device="cuda", dtype=torch.float32):
    return build(tiny_config(architecture, hidden=128), ATTENTION).to(device, dtype)


def requests():
    """5 prompts x 4."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (1, 30, 7, 19, 4)]
    return [Request(prompt, [stream_key(7, 0, row, k) for k in range(4)]) for row, prompt in enumerate(prompts)]


def logp(groups):
    return [value for group in groups for completion in group for value in completion.logp]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernels_of_sampling_and_the_head_compute_what_torch_does(dtype):
    device = torch.device("cuda", 0)
    for vocabulary in (29, 151_936):
        for filters in (Filters(0.7), Filters(1.2, 300, ONE * 9 // 10, UNIT // 1000)):
            assert categorical._kernel_agrees(device, dtype, vocabulary, filters)
    assert softmax._kernel_agrees(device, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernels_of_training_compute_what_torch_does(dtype):
    """Heads, real sizes, the widest, and sizes that are no power of two; gradients included."""
    device, formula = torch.device("cuda", 0), norm.Formula(1e-6)
    for size in (64, 100, 128, 896, 1536, 3584, 5120, norm.WIDEST):
        for kind in (formula, formula._replace(rounds=False), formula._replace(offset=1.0, rounds=False)):
            assert layers._norm_agrees(device, dtype, size, kind), (size, kind)
    assert layers._gate_agrees(device, dtype) and layers._rotation_agrees(device, dtype)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "qwen3_next"])
def test_fused_layers_train_as_those_of_transformers(architecture, checkpointing, monkeypatch):
    """In float32, on the GPU both."""
    prompts, completions = [[1, 2, 3]] * 4, [[row] * (4 + row) for row in range(4)]
    [micro] = pack(TokenRow.of(prompts, completions), 10_000, torch.device("cuda"), share="on")
    results = []
    for adopt in (layers.install_fused_layers, lambda *_: None):
        monkeypatch.setattr("hybrid_grpo.model.logprobs.install_fused_layers", adopt)
        model = build(tiny_config(architecture, hidden=128), ATTENTION).to("cuda").train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        logp, _ = LogprobModel(model)(*micro.inputs, 1.0)
        (logp * torch.linspace(-1, 1, len(logp), device="cuda")).sum().backward()
        taken = sum("forward" in module.__dict__ for module in model.base_model.modules())
        results.append((taken, [logp.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]))
    (taken, found), (plain, expected) = results
    assert taken > plain + 6
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-3 * theirs.norm() + 1e-5


def test_the_kernel_of_attention_gives_what_sinks_need():
    """The log-sum-exp of each query, and gradients that follow it."""
    assert has_ragged_kernel(torch.zeros(3, 8, 64, device="cuda", dtype=torch.bfloat16), 0.0, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_for_pages_is_right(dtype):
    """For a plain model, one with windows and soft caps, one with sinks, and latents."""
    sinks = torch.zeros(8, device="cuda")
    for (d, v), group, options in (
        ((128, 128), 6, Options(1.0)),
        ((256, 256), 2, Options(1.0, 4096, 50.0)),
        ((64, 64), 8, Options(1.0, 128, sinks=sinks)),
        ((576, 512), 16, Options(1.0)),
    ):
        keys, values = (torch.empty(1, width, device="cuda", dtype=dtype) for width in (d, v))
        assert has_kernel(torch.device("cuda", 0), paged_attention.PAGE, keys, values, group, options), (d, options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@torch.inference_mode()
def test_steps_of_llama_like_models_are_fused(architecture, dtype):
    model = view(architecture, dtype=dtype)
    cache = PagedCache(geometry_of(model), 2, 32, torch.device("cuda", 0))
    assert isinstance(fused_step(model, cache), GpuStep)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_steps_in_float32_agree_with_the_cpu(stage, folder, capsys):
    (gpu,) = ranks(1, stage, folder, accelerator="cuda")
    (cpu,) = ranks(1, stage, folder)
    assert [row[:2] for row in gpu["rollouts"][0]] == [row[:2] for row in cpu["rollouts"][0]]
    assert gpu["metrics"][0]["policy/grad_norm"] == pytest.approx(cpu["metrics"][0]["policy/grad_norm"], rel=1e-3)
    assert gpu["metrics"][0]["parity/logp_abs_diff_max"] < 1e-3
    assert gpu["metrics"][0]["memory/peak_gb"] > 0
    # Of a task this small the switch is not a small part: a number to look at, not to hold to.
    with capsys.disabled():
        for name in ("time/gather_s", "time/switch_s", "time/generate_s", "time/step_s"):
            print(f"\n{name} {gpu['metrics'][1][name]:.4f}", end="")


def test_the_reference_and_the_export(folder):
    (seen,) = ranks(1, "export", folder, accelerator="cuda")
    # Products that lie side by side in the gathered weights are one, which rounds otherwise.
    assert seen["reference"] < 1e-4 and seen["exported"] < 1e-4 and seen["trained"] and seen["tied"], seen


def test_adapters_beside_a_base_in_four_bits(folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    for task in (folder, shutil.copytree(folder, tmp_path / "merged")):
        (seen,) = ranks(1, "packed", task, accelerator="cuda", programs="lora_programs.py")
        first, second = seen["metrics"]
        assert first["policy/kl"] == 0 < second["policy/kl"] and second["parity/logp_abs_diff_max"] < 1e-3


def test_bfloat16_and_offloading_to_the_host(folder):
    (seen,) = ranks(1, "variants", folder, accelerator="cuda")
    for name in seen.keys() - {"checkpointing"}:
        assert seen[name]["policy/skipped_steps"] == 0
        assert 0 < seen[name]["parity/logp_abs_diff_mean"] < 0.02, name


def test_the_fused_optimizer_is_saved_and_resumed(folder):
    """It counts steps on the GPU; a count on the host, as other optimizers have it, is read as an address there."""
    (seen,) = ranks(1, "fused", folder, accelerator="cuda", programs="reshaping_programs.py")
    assert seen["fused"] and seen["steps on"] == ["cuda"] and seen["saved"]["again"]
    for ours, theirs in zip(seen["resumed"]["metrics"], seen["saved"]["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)


# Gemma 2 has windows, soft caps and a tied head.
@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "gpt_oss"])
def test_greedy_tokens_in_float32_are_those_of_the_cpu(architecture, captures):
    sampling = Sampling(LIMIT, temperature=GREEDY, stop_ids=STOPS)
    # Fewer slots than completions: they queue, leave and move.
    on_gpu, _ = generate(view(architecture), requests(), sampling, max_slots=7)
    on_cpu, _ = generate(view(architecture, "cpu"), requests(), sampling, max_slots=7)
    # torch multiplies experts in float32 with the host's help, which no graph can have; steps then run as they are.
    assert captures or architecture == "gpt_oss"
    assert tokens(on_gpu) == tokens(on_cpu)
    assert logp(on_gpu) == pytest.approx(logp(on_cpu), abs=1e-4)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_graphs_change_nothing_in_bfloat16(architecture, captures, monkeypatch):
    # The penalty adds what was seen to the state that graphs change in place.
    sampling = Sampling(LIMIT, temperature=1.3, top_p=0.9, repetition_penalty=1.2, stop_ids=STOPS)
    with_graphs, _ = generate(view(architecture, dtype=torch.bfloat16), requests(), sampling, max_slots=7)
    assert captures
    assert {c.finish for group in with_graphs for c in group} == {"stop", "length"}

    def refused(step, pool=None):
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(decoder, "on_cuda", refused)
    with pytest.warns(UserWarning, match="slower without CUDA graphs: no graphs here"):
        without, _ = generate(view(architecture, dtype=torch.bfloat16), requests(), sampling, max_slots=7)
    assert tokens(with_graphs) == tokens(without)
    assert logp(with_graphs) == pytest.approx(logp(without), abs=1e-6)


def test_graphs_are_kept_for_all_calls_and_see_new_weights(captures):
    sampling, kept, anew = Sampling(LIMIT), Workspace(20, 60), Workspace(20, 60)
    model, fresh = view("qwen2", dtype=torch.bfloat16), view("qwen2", dtype=torch.bfloat16)
    first, stats = generate(model, requests(), sampling, workspace=kept)
    # Of 20, 16, 8, 4, 2 and 1 rows, a forward and a choice each.
    assert stats.captures == 6 and len(captures) == 12
    again, _ = generate(model, requests(), sampling, workspace=kept)
    assert tokens(again) == tokens(first) and logp(again) == logp(first)

    with torch.no_grad():
        for parameter in (*model.parameters(), *fresh.parameters()):
            parameter.mul_(1.1)
    trained, _ = generate(model, requests(), sampling, workspace=kept)
    for other in (Sampling(LIMIT, temperature=GREEDY), Sampling(5, top_p=0.9), replace(sampling, stop_ids=STOPS)):
        _, stats = generate(model, requests()[1:], other, workspace=kept)
        assert stats.captures == 0
    expected, _ = generate(fresh, requests(), sampling, workspace=anew)
    assert tokens(trained) == tokens(expected) != tokens(first)


def test_without_a_workspace_all_memory_is_given_back(captures):
    model, held = view("qwen2", dtype=torch.bfloat16), []
    for workspace in (None, None, Workspace(20, 60)):
        generate(model, requests(), Sampling(LIMIT), workspace=workspace)
        held.append(torch.cuda.memory_allocated())
    # What libraries keep for themselves is there after the first call.
    assert captures and held[0] == held[1] < held[2]


def test_when_pages_run_out_sequences_go_back_and_come_out_the_same(monkeypatch):
    monkeypatch.setattr(loops, "PAGE", 4)
    model, sampling = view("qwen2"), Sampling(LIMIT, temperature=1.3, stop_ids=STOPS)
    roomy, stats = generate(model, requests(), sampling)
    assert not stats.preempted
    # The longest prompt and completion take 30 + 24 tokens.
    for held in (200, 80):
        cache_gb = held * TOKEN_BYTES / 2**30
        squeezed, stats = generate(model, requests(), sampling, cache_gb=cache_gb)
        assert stats.preempted > 0
        assert stats.peak_cache_bytes <= held * TOKEN_BYTES
        assert tokens(squeezed) == tokens(roomy)
        assert logp(squeezed) == pytest.approx(logp(roomy), abs=1e-4)


@pytest.mark.parametrize("share", ["on", "off"])
@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "gemma2", "gpt_oss", "mimo_v2_flash"])
def test_packed_training_in_half_precision_is_that_of_the_cpu(architecture, share):
    """The kernels for variable lengths, windows included; soft caps go segment by segment without flash-attn."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (30, 7) for _ in range(4)]
    completions = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 40))] for _ in prompts]

    def scored(device, dtype):
        model = build(tiny_config(architecture, hidden=128), ATTENTION).to(device, dtype)
        [micro] = pack(TokenRow.of(prompts, completions), 10_000, torch.device(device), share=share)
        logp, _ = LogprobModel(model)(*micro.inputs, 1.0)
        (logp * torch.linspace(-1, 1, len(logp), device=device)).sum().backward()
        return logp.detach().cpu(), [p.grad.float().cpu() for p in model.parameters()]

    (logp, gradients), (expected, expected_gradients) = scored("cuda", torch.bfloat16), scored("cpu", torch.float32)
    assert (logp - expected).abs().mean() < 0.1
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > 0.95


def test_two_packed_backwards_on_a_gpu_are_equal_to_the_bit():
    prompts, completions = [[1, 2, 3]] * 8, [[rng] * (4 + rng) for rng in range(8)]
    model = build(tiny_config("qwen2", hidden=128), ATTENTION).to("cuda")
    [micro] = pack(TokenRow.of(prompts, completions), 10_000, torch.device("cuda"), share="on")

    def gradients():
        model.zero_grad()
        LogprobModel(model)(*micro.inputs, 1.0)[0].sum().backward()
        return [p.grad.clone() for n, p in model.named_parameters() if "embed" not in n]

    assert all(map(torch.equal, gradients(), gradients()))


def test_a_reward_model_scores_in_a_thread_while_graphs_are_captured(tmp_path):
    """What it allocates must not spoil a capture, nor a capture its scores."""
    model = str(make_reward_model(tmp_path))
    prompts, texts = [f"{'abc' * (k % 9)}? " for k in range(400)], ["xyz"[: k % 4] for k in range(400)]
    x = torch.ones(64, 64, device="cuda")
    expected = x @ x
    with ThreadPoolExecutor(1) as thread:
        scores = thread.submit(reward_model, prompts, texts, model=model, device="cuda", batch_tokens=256)
        while not scores.done():
            replay, result = graphs.on_cuda(lambda: x @ x)
            replay()
            assert torch.equal(result, expected)
    assert scores.result() == pytest.approx(reward_model(prompts, texts, model=model, device="cpu"), abs=1e-3)
