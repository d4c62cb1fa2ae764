"""Packed forwards, with and without a shared prompt, against the model's own on one row at a time."""

import random
from collections import Counter
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from rank_threads import in_ranks
from tiny_models import ARCHITECTURES, MORE_ATTENTION, STATES, build, tiny_config

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.packing import pack, pad
from hybrid_grpo.distributed.ranks import neighbors
from hybrid_grpo.model import attention, layers, routing
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.kernels import attention as kernels
from hybrid_grpo.model.kernels.build import run
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.routing import recomputed
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.model.upload import Selection

CPU = torch.device("cpu")
TEMPERATURE = 0.8


@pytest.fixture(params=["kernels", "torch", "gpu"])
def by(request, monkeypatch):
    """Who computes: the kernels, torch on a CPU, or torch as on a GPU that has no kernel."""
    if request.param != "kernels":
        request.getfixturevalue("torch_only")
    monkeypatch.setattr(attention, "on_gpu", lambda _: request.param == "gpu")


def rollout(groups=3, size=4, seed=0):
    """Prompts and completions of every row, one completion of a single token among them."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 60) for _ in range(rng.randint(1, 12))] for _ in range(groups)]
    completions = [[rng.randrange(60) for _ in range(rng.randint(1, 20))] for _ in range(groups * size)]
    completions[1] = [7]
    return [prompt for prompt in prompts for _ in range(size)], completions


def own_logprobs(model, prompts, completions):
    """By row, from the logits of transformers' own forward; differentiable."""
    rows = []
    for prompt, completion in zip(prompts, completions, strict=True):
        logp = (model(torch.tensor([prompt + completion])).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
        rows.append(logp[len(prompt) - 1 :].gather(1, torch.tensor(completion)[:, None])[:, 0])
    return rows


def scored(model, batches):
    """By row; and the loss of `weighted`."""
    rows = {}
    for micro in batches:
        logp_N, _ = model(*micro.inputs, TEMPERATURE)
        logp_bT = micro.unflatten(logp_N)
        rows.update({row: logp_bT[i][micro.mask_bT[i]] for i, row in enumerate(micro.rows)})
    return [rows[row] for row in sorted(rows)]


def weighted(rows):
    """A loss in which every token counts differently."""
    return sum((torch.cos(torch.arange(len(row)) + 3.0 * i) * row).sum() for i, row in enumerate(rows))


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(own, packed):
    theirs, mine = gradients(own), gradients(packed)
    assert mine.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert torch.allclose(mine[name], gradient, atol=5e-5 * largest), name


@pytest.mark.parametrize("share", ["on", "off"])
@pytest.mark.parametrize("architecture", ARCHITECTURES + MORE_ATTENTION)
def test_packed_scores_and_gradients_are_those_of_the_models_own_forward(architecture, share, by):
    config = tiny_config(architecture)
    own, packed = build(config), build(config, ATTENTION)
    prompts, completions = rollout()
    expected = own_logprobs(own, prompts, completions)
    weighted(expected).backward()
    batches = pack(TokenRow.of(prompts, completions), 70, CPU, share=share)
    assert len(batches) > 1
    found = scored(LogprobModel(packed), batches)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=2e-5)
    weighted(found).backward()
    assert_same_gradients(own, packed)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *MORE_ATTENTION} - {*STATES}))
def test_rows_that_ranks_share_are_those_of_one(architecture, world):
    """Each rank has other rows, the last none; with 3 there are fewer key heads than ranks."""
    config = tiny_config(architecture, hidden=16 * world, num_attention_heads=2 * world)
    own, (prompts, completions) = build(config), rollout()
    expected = own_logprobs(own, prompts, completions)
    weighted(expected).backward()

    def program(rank):
        model, found = LogprobModel(build(config, ATTENTION)), {}
        rows = TokenRow.of(prompts, completions)[rank :: world - 1] if rank < world - 1 else []
        for micro in pack(rows, 20, CPU, share="on", group=neighbors(world)):
            logp_bT = micro.unflatten(model(*micro.inputs, TEMPERATURE)[0])
            own = {row: logp_bT[i][micro.mask_bT[i]] for i, row in enumerate(micro.rows)}
            loss = sum((torch.cos(torch.arange(len(x)) + 3.0 * row) * x).sum() for row, x in own.items())
            (loss + 0 * logp_bT.sum()).backward()
            found |= {row: x.detach() for row, x in own.items()}
        return gradients(model.model), found

    ended = in_ranks(world, program)
    scored = {row: value for _, found in ended for row, value in found.items()}
    assert all(torch.allclose(scored[row], theirs, atol=2e-5) for row, theirs in enumerate(expected))
    theirs = gradients(own)
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        mine = sum(of_rank.get(name, torch.zeros(())) for of_rank, _ in ended)
        assert torch.allclose(mine, gradient, atol=5e-5 * largest), name


@pytest.mark.parametrize("architecture", STATES)
def test_rows_of_layers_with_states_are_not_shared(architecture):
    def program(rank):
        [micro, _] = pack(TokenRow.of([[1, 2]], [[3, 4, 5]]), 20, CPU, share="on", group=neighbors(2))
        LogprobModel(build(tiny_config(architecture), ATTENTION))(*micro.inputs, TEMPERATURE)

    with pytest.raises(UserError, match=r"^engine\.sequence_parallel: policy\.model has layers with states"):
        in_ranks(2, program)


def test_padded_rows_score_the_same():
    model = build(tiny_config("qwen2"))
    prompts, completions = rollout()
    expected = own_logprobs(model, prompts, completions)
    found = scored(LogprobModel(model), pad(TokenRow.of(prompts, completions), 70, CPU))
    assert all(torch.allclose(mine, theirs, atol=2e-5) for mine, theirs in zip(found, expected, strict=True))


def test_windows_are_seen_across_the_end_of_a_shared_prompt(by):
    """A window shorter than a prompt: what the completion no longer sees must not count."""
    config = tiny_config("mistral")
    own, packed = build(config), build(config, ATTENTION)
    rng = random.Random(1)
    prompt = [rng.randrange(60) for _ in range(30)]
    completions = [[rng.randrange(60) for _ in range(n)] for n in (3, 9, 25)]
    expected = own_logprobs(own, [prompt] * 3, completions)
    [micro] = pack(TokenRow.of([prompt] * 3, completions), 1000, CPU, share="on")
    found = scored(LogprobModel(packed), [micro])
    assert all(torch.allclose(mine, theirs, atol=2e-5) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("architecture", ["qwen2", "mistral"])
def test_segments_of_like_lengths_attend_in_one_call_on_a_gpu(architecture, torch_only, monkeypatch):
    """In float32, where a GPU has no kernel, each of a tree's segments had a call of its own."""
    monkeypatch.setattr(attention, "on_gpu", lambda _: True)
    config, rng = tiny_config(architecture), random.Random(1)
    own, packed = build(config), build(config, ATTENTION)
    turns = [[rng.randrange(1, 60) for _ in range(length)] for length in (9, 8, 12)]
    prompts = [[token for turn in turns[: 1 + row % 3] for token in turn] for row in range(48)]
    completions = [[rng.randrange(60) for _ in range(rng.randint(16, 31))] for _ in prompts]
    [micro] = pack(TokenRow.of(prompts, completions), 10_000, CPU, share="on")
    with patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as calls:
        found = scored(LogprobModel(packed), [micro])
    assert calls.call_count <= 6 * config.num_hidden_layers
    expected = own_logprobs(own, prompts, completions)
    assert all(torch.allclose(mine, theirs, atol=2e-5) for mine, theirs in zip(found, expected, strict=True))
    weighted(found).backward()
    weighted(expected).backward()
    assert_same_gradients(own, packed)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "gemma4_text"])
def test_gradient_checkpointing_changes_nothing(architecture, long, monkeypatch):
    """Layers that are computed again in backward find the keys and values of others, and give gradients to sinks. In
    long rows their attention is kept, and MLPs are computed in tiles."""
    prompts, completions = rollout()
    batches = pack(TokenRow.of(prompts, completions), 1000, CPU, share="on")
    model, called = build(tiny_config(architecture), ATTENTION).train(), []
    if long:
        monkeypatch.setattr(layers, "TILE", 8)
        monkeypatch.setattr(routing, "LONG", 16)
    monkeypatch.setattr(kernels, "run", lambda name, *given: called.append(name) or run(name, *given))
    weighted(scored(LogprobModel(model), batches)).backward()
    plain, once = gradients(model), Counter(called)
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": partial(recomputed, True)})
    weighted(scored(LogprobModel(model), batches)).backward()
    assert called.count("segment_attention") == (2 if long else 3) * once["segment_attention"]
    atol = 1e-6 * max(float(gradient.abs().max()) for gradient in plain.values()) if long else 0
    assert all(torch.allclose(g, plain[name], rtol=0, atol=atol) for name, g in gradients(model).items())


def test_a_selection_sums_the_gradients_of_every_use():
    index = torch.tensor([2, 0, 2, 2, 1, 0])
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    out = Selection(index.numpy(), CPU)(x)
    assert torch.equal(out, x[index])
    out.backward(torch.arange(18.0, dtype=torch.float64).view(6, 3))
    assert x.grad.tolist() == [[18.0, 20.0, 22.0], [12.0, 13.0, 14.0], [15.0, 18.0, 21.0], [0.0, 0.0, 0.0]]
