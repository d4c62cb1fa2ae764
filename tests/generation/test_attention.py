"""Attention over the cache and over packed rows as on a GPU, by doubles that know the kernels' rules."""

from collections import Counter

import gpu_attention
import pytest
import torch
from host_waits import HostWaits
from tiny_models import ARCHITECTURES, VOCABULARY, build, tiny_config

from hybrid_grpo.data.packing import pack
from hybrid_grpo.generation import Request, Sampling, generate, stream_key
from hybrid_grpo.generation import loop as loops
from hybrid_grpo.model import attention
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.logprobs import LogprobModel

pytestmark = pytest.mark.usefixtures("torch_only")
LENGTHS = (1, 30, 7, 19, 4)


@pytest.fixture(params=["flash-attn", "torch"])
def as_on_a_gpu(request, monkeypatch):
    gpu_attention.install(monkeypatch, flash=request.param == "flash-attn")
    monkeypatch.setitem(loops.PAGE, "cpu", loops.PAGE["cuda"])


def in_bfloat16(architecture):
    return build(tiny_config(architecture), ATTENTION).to(torch.bfloat16)


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def expected_logp(architecture, model, prompt, completion):
    """By transformers' own attention in float32, on the same weights."""
    plain = build(tiny_config(architecture), "eager").float()
    plain.load_state_dict(model.state_dict())
    logits = plain(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
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
    assert few.pop("tolist at decoder.py") < many.pop("tolist at decoder.py")
    # What is left happens once in a call: the memory of a CPU's cache, and the sampler's own tensors.
    assert few == many and few.keys() == {"lift_fresh at cache.py", "lift_fresh at sampler.py"}


@pytest.mark.parametrize("prefill_tokens", [None, 8])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
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
    # Rounding to bfloat16; a token too many or too few in the attention makes it more than 0.3 on average.
    assert gaps.mean() < 0.06 and gaps.max() < 0.6


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "mistral"])
def test_packed_rows_of_training(monkeypatch, architecture):
    """Shared prompts, windows and soft caps; gradients too, against torch's way through one segment at a time. With
    gradient checkpointing both are the same to the bit."""
    model = in_bfloat16(architecture).train()
    rows = [ids for ids in prompts() for _ in range(3)]
    completions = [ids[: 2 + row % 5] or [1] for row, ids in enumerate(reversed(rows))]
    [micro] = pack(rows, completions, range(len(rows)), 10_000, torch.device("cpu"), share="on")

    calls, attend = [], attention.Segments.attend
    monkeypatch.setattr(attention.Segments, "attend", lambda *given: calls.append(given) or attend(*given))

    def run():
        model.zero_grad()
        logp_N, _ = LogprobModel(model)(*micro.inputs, 1.0)
        logp_N.sum().backward()
        return logp_N.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters()])

    plain_N, plain_gradient = run()
    for flash in (True, False):
        gpu_attention.install(monkeypatch, flash=flash)
        logp_N, gradient = run()
        assert (logp_N - plain_N).abs().mean() < 0.02
        assert torch.cosine_similarity(gradient, plain_gradient, dim=0) > 0.999
        model.gradient_checkpointing_enable({"use_reentrant": False})
        calls.clear()
        assert all(map(torch.equal, run(), (logp_N, gradient)))
        assert len(calls) == 2 * model.config.num_hidden_layers, "every layer is computed again in backward"
        model.gradient_checkpointing_disable()


def test_doubles_refuse_what_the_kernels_refuse():
    half = torch.zeros(2, 4, 8, dtype=torch.bfloat16)
    pool = torch.zeros(3, 256, 2, 8, dtype=torch.bfloat16)
    begins, used = torch.arange(3, dtype=torch.int32), torch.tensor([5, 9], dtype=torch.int32)
    table = torch.ones(2, 2, dtype=torch.int32)
    paged = {"scale": 1.0, "enable_gqa": True, "seqused_k": used, "block_table": table, "num_splits": 1}

    def call(query=half, keys=pool, begins_k=begins * 512, **changed):
        return gpu_attention.varlen_attn(query, keys, keys, begins, begins_k, 1, 512, **{**paged, **changed})

    assert call().shape == half.shape
    assert call(num_splits=None).isnan().any()
    for message, wrong in (
        ("requires cu_seq_k", {"begins_k": None}),
        ("fp16 and bf16", {"query": half.float(), "keys": pool.float()}),
        ("divisible by 256", {"keys": pool[:, :32].contiguous()}),
        ("int32", {"block_table": table.long()}),
        ("enable_gqa", {"enable_gqa": False}),
        ("requires seqused_k", {"seqused_k": None}),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(**wrong)
    assert not attention.has_paged_kernel(pool), "on a CPU"
