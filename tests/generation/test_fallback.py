import random

import pytest
import torch
from decoders import assert_alike, shapes_of_forwards, tokens
from decoders import generate as paged
from decoders import generate_by_transformers as generate
from tiny_models import STATEFUL, VOCABULARY, build, pair, tiny_config
from transformers import GenerationConfig

from hybrid_grpo.generation import GREEDY, Request, Sampling, stream_key

LENGTHS = [1, 2, 7, 19, 7, 1, 12]
LIMIT = 12


def requests_of(lengths, samples, limits=None):
    rng = random.Random(1)
    return [
        Request(
            [rng.randrange(VOCABULARY) for _ in range(length)],
            [stream_key(3, row, k) for k in range(samples)],
            limits and [limits[(row + k) % len(limits)] for k in range(samples)],
        )
        for row, length in enumerate(lengths)
    ]


def text(token_ids):
    """One letter a token."""
    return "".join(chr(ord("A") + token) for token in token_ids)


@pytest.fixture(scope="module")
def qwen2():
    return pair("qwen2")


@pytest.mark.parametrize("architecture", [*STATEFUL, "qwen2"])
def test_greedy_tokens_are_those_of_each_prompt_alone_and_logp_that_of_training(architecture):
    model = build(tiny_config(architecture))
    requests = requests_of(LENGTHS, 2)
    groups, stats = generate(model, requests, Sampling(LIMIT, temperature=GREEDY), max_slots=3)
    for request, group in zip(requests, groups, strict=True):
        prompt = torch.tensor([request.prompt_ids])
        with torch.no_grad():
            whole = model.generate(prompt, max_new_tokens=LIMIT, do_sample=False)
            logp = model(whole, use_cache=False).logits[:, prompt.shape[1] - 1 : -1].log_softmax(-1)
        alone = whole[0, prompt.shape[1] :]
        assert len(set(alone.tolist())) > 1, "text that never changes proves little"
        assert [completion.token_ids for completion in group] == [alone.tolist()] * 2
        expected = logp[0].gather(1, alone[:, None])[:, 0].tolist()
        assert all(completion.logp == pytest.approx(expected, abs=1e-4) for completion in group)
    assert stats.rows == len(LENGTHS) * 2 * LIMIT


@pytest.mark.parametrize("sampling", [
    Sampling(LIMIT),
    Sampling(LIMIT, temperature=1.4, top_k=12, top_p=0.9, min_p=0.02),
    Sampling(LIMIT, temperature=1.4, logprobs="sampling", top_p=0.9, logit_bias=((5, 2.0), (6, -50.0))),
    Sampling(LIMIT, temperature=1.4, logprobs="mask", top_p=0.9),
    Sampling(LIMIT, repetition_penalty=1.3, min_tokens=4, stop_ids=tuple(range(0, VOCABULARY, 6))),
    Sampling(LIMIT, temperature=GREEDY, repetition_penalty=1.3, stop_ids=tuple(range(0, VOCABULARY, 6))),
    Sampling(LIMIT, stop_strings=("M", "CD", "xy"), min_tokens=2),
])  # fmt: skip
@pytest.mark.parametrize("limits", [None, [1, 5, 9, LIMIT]])
def test_both_decoders_sample_the_same(qwen2, sampling, limits):
    model, view = qwen2
    requests = requests_of(LENGTHS, 3, limits)
    mine, my_stats = generate(model, requests, sampling, max_slots=4, decode=text)
    theirs, their_stats = paged(view, requests, sampling, max_slots=4, decode=text)
    assert_alike(mine, theirs, gap=1e-4)
    assert all(bool(completion.sidecars) == (sampling.logprobs == "mask") for group in mine for completion in group)
    assert my_stats.rows == their_stats.rows
    assert my_stats.context == their_stats.context


def test_the_model_s_own_generation_config_changes_nothing_and_comes_back(qwen2, monkeypatch):
    model, _ = qwen2
    requests = requests_of(LENGTHS, 2)
    plain, _ = generate(model, requests, Sampling(LIMIT))
    first = plain[0][0].token_ids
    other = min(set(range(VOCABULARY)) - set(first))
    own = GenerationConfig(do_sample=True, temperature=9.0, top_k=1, repetition_penalty=7.0, no_repeat_ngram_size=1)
    own.update(suppress_tokens=first, forced_eos_token_id=other, eos_token_id=first)
    own.update(num_beams=3, max_length=9, min_new_tokens=3)
    monkeypatch.setattr(model, "generation_config", own)
    again, _ = generate(model, requests, Sampling(LIMIT))
    assert model.generation_config is own
    assert tokens(again) == tokens(plain)


@pytest.mark.parametrize("max_slots", [1, 2, 5, 100])
def test_batches_keep_to_the_slots_and_to_one_prompt_length(qwen2, max_slots):
    model, _ = qwen2
    requests = requests_of(LENGTHS, 3)
    expected, _ = generate(model, requests, Sampling(4))
    masks = []
    note = lambda _, __, kwargs: masks.append(kwargs.get("attention_mask"))  # noqa: E731
    with shapes_of_forwards(model) as shapes, model.register_forward_pre_hook(note, with_kwargs=True):
        groups, stats = generate(model, requests, Sampling(4), max_slots=max_slots)
    assert tokens(groups) == tokens(expected)
    assert all(rows <= max_slots for rows, _ in shapes) and all(mask is None or mask.all() for mask in masks)
    assert len(shapes) == stats.steps
    # Each batch reads its prompts in its first forward of four; a length has 3 or 6 rows.
    assert sorted(width for _, width in shapes[::4]) == sorted(
        length for length in set(LENGTHS) for _ in range(-(-3 * LENGTHS.count(length) // max_slots))
    )
    assert stats.prefills == 3 * len(LENGTHS)


def test_every_completion_is_handed_on_once_and_at_once(qwen2):
    model, _ = qwen2
    requests = requests_of(LENGTHS, 3)
    seen = {}

    def note(request, sample, completion):
        assert (request, sample) not in seen
        seen[request, sample] = completion, len(forwards)

    with shapes_of_forwards(model) as forwards:
        groups, _ = generate(model, requests, Sampling(LIMIT, stop_ids=tuple(range(0, VOCABULARY, 6))), on_finish=note)
    assert {key: completion for key, (completion, _) in seen.items()} == {
        (request, sample): completion for request, group in enumerate(groups) for sample, completion in enumerate(group)
    }
    # The longest prompt is the first batch: forward number n gives its n-th tokens.
    alone = LENGTHS.index(max(LENGTHS))
    for sample, completion in enumerate(groups[alone]):
        assert seen[alone, sample][1] == len(completion.token_ids)
    assert len({len(completion.token_ids) for completion in groups[alone]}) > 1


def test_weights_stay_and_get_no_gradient(qwen2):
    model, _ = qwen2
    before = [parameter.clone() for parameter in model.parameters()]
    generate(model, requests_of([5], 2), Sampling(3))
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_no_requests_are_no_work(qwen2):
    for decoder, model in zip((generate, paged), qwen2, strict=True):
        groups, stats = decoder(model, [], Sampling(5))
        assert groups == [] and (stats.steps, stats.rows, stats.prefills) == (0, 0, 0)
