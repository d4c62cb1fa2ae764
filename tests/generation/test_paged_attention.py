"""Attention over the cache and over packed rows as on a GPU, by doubles that know the kernels' rules."""

import functools
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import gpu_attention
import pytest
import torch
from host_waits import HostWaits
from paths import ROOT
from tiny_models import ARCHITECTURES, MORE_ATTENTION, STATES, VOCABULARY, build, tiny_config

from hybrid_grpo.commands.description import describe
from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.data.packing import pack
from hybrid_grpo.generation import Request, Sampling, generate, stream_key
from hybrid_grpo.generation.paged_attention import has_kernel
from hybrid_grpo.model import attention, ragged_attention
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.ragged_attention import Options
from hybrid_grpo.model.sidecars import TokenRow

pytestmark = pytest.mark.usefixtures("torch_only")
LENGTHS = (1, 30, 7, 19, 4)


@pytest.fixture(params=["flash-attn", "torch"])
def as_on_a_gpu(request, monkeypatch):
    gpu_attention.install(monkeypatch, flash=request.param == "flash-attn")


def in_bfloat16(architecture):
    return build(tiny_config(architecture), ATTENTION).to(torch.bfloat16)


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def expected_logp(architecture, model, prompt, completion):
    """By transformers' own attention on the same weights, in float32; but for layers with a state, which amplify what
    rounding does to the experts that are chosen before them, in bfloat16."""
    plain = build(tiny_config(architecture), "eager").to(torch.bfloat16 if architecture in STATES else torch.float32)
    plain.load_state_dict(model.state_dict())
    logits = plain(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@torch.no_grad()
def test_prefills_admissions_and_steps_wait_for_nothing_but_tokens(as_on_a_gpu):
    """Completions queue for slots, so that sequences are admitted while steps run."""
    model = in_bfloat16("qwen2")

    def waits(samples):
        requests = [Request(ids, [stream_key(row, k) for k in range(samples)]) for row, ids in enumerate(prompts())]
        with HostWaits() as waiting:
            generate(model, requests, Sampling(12, stop_ids=(3,)), max_slots=3, prefill_tokens=8)
        return Counter(seen.rpartition(":")[0] for seen in waiting.seen)

    waits(1)
    few, many = waits(1), waits(4)
    assert few.pop("tolist at sampler.py") < many.pop("tolist at sampler.py")
    # What is left happens once in a call: the memory of a CPU's cache, and the sampler's own tensors.
    assert few == many and few.keys() == {"lift_fresh at cache.py", "lift_fresh at sampler.py"}


@pytest.mark.parametrize("prefill_tokens", [None, 8])
@pytest.mark.parametrize("architecture", ARCHITECTURES + MORE_ATTENTION)
@torch.no_grad()
def test_the_decode_loop_in_bfloat16(as_on_a_gpu, architecture, prefill_tokens):
    """A prompt of 30 tokens is also read in parts, whose queries have more keys than there are queries."""
    model = in_bfloat16(architecture)
    requests = [Request(ids, [stream_key(row, k) for k in range(2)]) for row, ids in enumerate(prompts())]
    groups, _ = generate(model, requests, Sampling(12), max_slots=7, prefill_tokens=prefill_tokens)
    gaps = torch.cat(
        [
            (torch.tensor(c.logp) - expected_logp(architecture, model, request.prompt_ids, c.token_ids)).abs()
            for request, group in zip(requests, groups, strict=True)
            for c in group
        ]
    )
    assert gaps.isfinite().all()
    if architecture == "deepseek_v3":
        # Decoding over latents rounds other numbers than training: then a token may get other experts.
        gaps = gaps.sort().values[: int(0.95 * len(gaps))]
    # Rounding to bfloat16; a token too many or too few in the attention makes it more than 0.3 on average.
    assert gaps.mean() < 0.06 and gaps.max() < 0.6


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "mistral", "gpt_oss", "mimo_v2_flash"])
def test_packed_rows_of_training(monkeypatch, architecture):
    """Shared prompts, windows, soft caps and sinks; gradients too, against torch's way through one segment at a time.
    With gradient checkpointing both are the same to the bit."""
    model = in_bfloat16(architecture).train()
    rows = [ids for ids in prompts() for _ in range(3)]
    completions = [ids[: 2 + row % 5] or [1] for row, ids in enumerate(reversed(rows))]
    [micro] = pack(TokenRow.of(rows, completions), 10_000, torch.device("cpu"), share="on")

    calls, attend, padded = [], attention.Segments.attend, attention._Bucket.attend
    monkeypatch.setattr(attention.Segments, "attend", lambda *given: calls.append(given) or attend(*given))

    def run():
        model.zero_grad()
        logp_N, _ = LogprobModel(model)(*micro.inputs, 1.0)
        logp_N.sum().backward()
        return logp_N.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters()])

    plain_N, plain_gradient = run()
    plainly = []
    monkeypatch.setattr(attention._Bucket, "attend", lambda *given: plainly.append(1) or padded(*given))
    for flash, kernel in (
        (True, gpu_attention.varlen_attn),
        (False, gpu_attention.varlen_attn),
        (False, gpu_attention.varlen_attn_of_2_11),
    ):
        gpu_attention.install(monkeypatch, flash=flash, torch_kernel=kernel)
        logp_N, gradient = run()
        assert (logp_N - plain_N).abs().mean() < 0.03
        assert torch.cosine_similarity(gradient, plain_gradient, dim=0) > 0.998
        model.activation_checkpointing_enable({"use_reentrant": False})
        calls.clear()
        assert all(map(torch.equal, run(), (logp_N, gradient)))
        assert len(calls) == 2 * model.config.num_hidden_layers, "every layer is computed again in backward"
        model.activation_checkpointing_disable()
        # Of torch's kernels none has soft caps.
        assert bool(plainly) == (architecture == "gemma2" and not flash)


@pytest.mark.process
def test_flash_attn_is_taken_only_where_its_functions_are_there_and_right(monkeypatch, tmp_path):
    """flash-attn-4 alone leaves a package without them; a wheel may lack the GPU's architecture."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    code = "import sys; sys.path.insert(0, sys.argv[1]); from hybrid_grpo.model import ragged_attention; "
    code += "assert ragged_attention.flash_attn_varlen_func is None"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=True)
    (tmp_path / "flash_attn_interface.py").write_text("flash_attn_varlen_func = 3")
    subprocess.run([sys.executable, "-c", code.replace("is None", "== 3"), str(tmp_path)], cwd=ROOT, check=True)

    x = torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    gpu_attention.install(monkeypatch, flash=True)
    assert ragged_attention.has_flash(x) and not ragged_attention.has_flash(x.float())

    def lacking(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors")

    def of_another_head(q, k, v, *rest, **options):
        return gpu_attention.flash_attn_varlen_func(q, k.flip(1), v.flip(1), *rest, **options)

    for kernel, reason in ((lacking, "no kernel image"), (of_another_head, "results differ from torch's")):
        gpu_attention.install(monkeypatch, flash=True)
        monkeypatch.setattr(ragged_attention, "flash_attn_varlen_func", kernel)
        with pytest.warns(UserWarning, match=f"^attention is slower without flash-attn: .*{reason}.*$") as said:
            assert not ragged_attention.has_flash(x) and not ragged_attention.has_flash(x)
        assert len(said) == 1 and ragged_attention.has_ragged_kernel(x, 0.0, False), "torch's is taken"


def test_kernels_with_a_wrong_log_sum_exp_are_not_taken_for_sinks(monkeypatch):
    """Without sinks nobody looks at it."""
    x = torch.zeros(3, 4, 8, dtype=torch.bfloat16)

    @functools.wraps(gpu_attention.varlen_attn)
    def transposed(*given, **options):
        found = gpu_attention.varlen_attn(*given, **options)
        return (found[0], found[1].flip(1)) if options.get("return_aux") else found

    gpu_attention.install(monkeypatch, flash=False)
    assert ragged_attention.has_ragged_kernel(x, 0.0, True)
    gpu_attention.install(monkeypatch, flash=False, torch_kernel=transposed)
    with pytest.warns(UserWarning, match="^attention is slower without torch's varlen_attn for attention sinks: "):
        assert not ragged_attention.has_ragged_kernel(x, 0.0, True)


def test_which_attention_runs_is_said(monkeypatch, tmp_path):
    cpu, cases = torch.device("cpu"), {}
    for architecture in ("qwen2", "gemma2", "gpt_oss"):
        tiny_config(architecture).save_pretrained(tmp_path / architecture)
    # Gemma 4 has heads of 8 and, without windows, of 264, more than the kernels have.
    tiny_config("gemma4_text", global_head_dim=264).save_pretrained(tmp_path / "gemma4_text")
    half = PolicyConfig(model=str(tmp_path / "qwen2"))
    gpu_attention.install(monkeypatch, flash=True)
    cases["flash"] = describe(half, cpu, paged=True)
    cases["sinks"] = describe(replace(half, model=str(tmp_path / "gpt_oss")), cpu, paged=True)
    gpu_attention.install(monkeypatch, flash=False)
    cases["torch"] = describe(half, cpu)
    cases["wide"] = describe(replace(half, model=str(tmp_path / "gemma4_text")), cpu)
    cases["float32"] = describe(replace(half, dtype="float32"), cpu)
    cases["caps"] = describe(replace(half, model=str(tmp_path / "gemma2")), cpu)
    gpu_attention.install(monkeypatch, flash=False, torch_kernel=gpu_attention.varlen_attn_of_2_11)
    cases["2.11"] = describe(half, cpu, paged=True)
    slow = "; WARNING: slow, because no GPU kernel supports this: "
    cure = "install flash-attn (the extra flash) or torch 2.12"
    assert cases == {
        "flash": "training by flash-attn, decoding by a Triton kernel",
        "sinks": "training by torch's varlen_attn, decoding by a Triton kernel",
        "torch": "training by torch's varlen_attn",
        "wide": f"training by torch, on padded sequences{slow}heads of 264 numbers are wider than 256",
        "float32": f"training by torch, on padded sequences{slow}set policy.dtype: bfloat16",
        "caps": f"training by torch, on padded sequences{slow}{cure}",
        "2.11": "training by torch's varlen_attn, decoding by a Triton kernel",
    }


def test_a_kernel_for_pages_that_is_wrong_is_not_taken(monkeypatch):
    """A key too many is seen, and so is a sequence whose parts are added up wrongly."""
    pool, kinds = torch.zeros(2, 32, 2, 8), (Options(1.0), Options(1.0, window=9), Options(1.0, sinks=torch.ones(4)))

    def taken(kernel):
        gpu_attention.install(monkeypatch, flash=False)
        monkeypatch.setattr(gpu.attention, "paged_attention", kernel)
        return [has_kernel(torch.device("cpu"), 32, pool, pool, 2, options) for options in kinds]

    def later(query, keys, values, table, position, *rest, **more):
        return gpu_attention.paged_attention(query, keys, values, table, position - 1, *rest, **more)

    def halved(*given, budget=1, **more):
        return gpu_attention.paged_attention(*given, **more) * (1.0 if budget == 1 else 0.5)

    assert taken(gpu_attention.paged_attention) == [True] * 3
    for wrong in (later, halved):
        with pytest.warns(UserWarning, match="^decoding is slower without a Triton kernel: its results differ"):
            assert taken(wrong) == [False] * 3


def test_doubles_refuse_what_the_kernels_refuse():
    half, table = torch.zeros(2, 4, 8, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.int32)
    pool, position = torch.zeros(3, 32, 2, 8, dtype=torch.bfloat16), torch.tensor([5, 9])
    begins = torch.arange(3, dtype=torch.int32)

    def pages(query=half, keys=pool, table=table, position=position):
        return gpu_attention.paged_attention(query, keys, pool, table, position, 1.0, 0, 0.0, None, {})

    def rows(query=half, key=half[:, :2], **changed):
        given = {"scale": 1.0, "enable_gqa": True, **changed}
        return gpu_attention.varlen_attn(query, key, key, begins, begins.clone(), 1, 1, **given)

    assert pages().shape == rows().shape == half.shape
    for message, call, wrong in (
        ("types of the table", pages, {"table": table.long()}),
        ("what belongs together", pages, {"keys": pool.float()}),
        ("queries of each sequence", pages, {"query": half[:1]}),
        ("fp16 and bf16", rows, {"query": half.float(), "key": half.float()[:, :2]}),
        ("enable_gqa", rows, {"enable_gqa": False}),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**wrong)
