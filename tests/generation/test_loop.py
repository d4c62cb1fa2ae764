import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from decoders import assert_alike, generate, shapes_of_forwards, tokens
from tiny_models import ARCHITECTURES, MORE_ATTENTION, VOCABULARY, WINDOW, pair

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.generation import GREEDY, Request, Sampling, decoder, stream_key
from hybrid_grpo.generation import loop as loops
from hybrid_grpo.generation.cache import PREFILL_TOKENS
from hybrid_grpo.generation.cpu_step import CpuStep
from hybrid_grpo.model.kernels import build as kernels

PROMPT_LENGTHS = [1, 2, 7, 19, 4, 1, 12, 9, 3, 16]
LIMIT = 24


def random_prompts(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def requests_of(prompts, samples, step=0):
    return [
        Request(prompt, [stream_key(7, step, row, k) for k in range(samples)]) for row, prompt in enumerate(prompts)
    ]


def through_transformers(model, prompts, stop_ids):
    """Greedy continuations by `generate()` of one left-padded batch, cut behind the stop token."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=LIMIT, do_sample=False, eos_token_id=stop_ids or None, pad_token_id=0
    )[:, width:].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stop_ids), LIMIT) for row in out]
    return [row[:end] for row, end in zip(out, ends, strict=True)]


def training_logp(model, prompt, completion, temperature):
    """Log-probabilities of a completion by one forward over the whole sequence, without a cache."""
    sequence = torch.tensor([prompt + completion])
    with torch.no_grad():
        logp = (model(sequence, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES + MORE_ATTENTION)
def test_greedy_tokens_are_those_of_transformers_and_logp_that_of_training(architecture):
    model, view = pair(architecture)
    prompts = random_prompts(PROMPT_LENGTHS)
    samples = 3
    # 5 slots for 30 completions: sequences queue, leave and move. 30 tokens a prefill: several of unequal lengths.
    squeeze = {"max_slots": 5, "prefill_tokens": 30}

    free, _ = generate(view, requests_of(prompts, samples), Sampling(LIMIT, temperature=GREEDY), **squeeze)
    # Rare tokens, so that some completions end early and others do not.
    stop_ids = tuple(token for token, _ in Counter(t for group in free for t in group[0].token_ids).most_common()[-3:])
    stopped, stats = generate(
        view, requests_of(prompts, samples), Sampling(LIMIT, temperature=GREEDY, stop_ids=stop_ids), **squeeze
    )

    assert {len(prompt) for prompt in prompts} >= {1, 19} and max(map(len, prompts)) > 2 * WINDOW
    assert all(len(set(group[0].token_ids)) > 1 for group in free), "text that never changes proves little"
    assert {c.finish for group in stopped for c in group} == {"stop", "length"}
    assert tokens(free) == [[row] * samples for row in through_transformers(model, prompts, ())]
    assert tokens(stopped) == [[row] * samples for row in through_transformers(model, prompts, stop_ids)]
    for prompt, group in zip(prompts, stopped, strict=True):
        assert group[0].logp == pytest.approx(training_logp(model, prompt, group[0].token_ids, 1.0), abs=1e-4)
        # By how many are decoded beside it, its sums may round differently.
        assert all(other.logp == pytest.approx(group[0].logp, abs=2e-5) for other in group)
    assert stats.rows == sum(len(c.token_ids) for group in stopped for c in group)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sampled_logp_agrees_with_the_training_forward(architecture):
    model, view = pair(architecture)
    prompts = random_prompts(PROMPT_LENGTHS)
    sampling = Sampling(LIMIT, temperature=1.7, top_k=20, top_p=0.9)
    groups, _ = generate(view, requests_of(prompts, 2), sampling, max_slots=7, prefill_tokens=25)
    for prompt, group in zip(prompts, groups, strict=True):
        assert group[0].token_ids != group[1].token_ids
        for completion in group:
            expected = training_logp(model, prompt, completion.token_ids, 1.7)
            assert completion.logp == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("architecture, without", [
    ("mistral", {"sliding_window": None}),
    ("gemma2", {"layer_types": ["full_attention", "full_attention"]}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
])  # fmt: skip
def test_the_windows_and_soft_caps_of_these_models_are_felt(architecture, without):
    """Or the equality with transformers would hold without them too."""
    prompts = random_prompts([19, 16])
    sampling = Sampling(LIMIT, temperature=GREEDY)
    with_it, _ = generate(pair(architecture)[1], requests_of(prompts, 1), sampling)
    without_it, _ = generate(pair(architecture, **without)[1], requests_of(prompts, 1), sampling)
    assert with_it[0][0].logp != pytest.approx(without_it[0][0].logp, abs=1e-2)


@pytest.fixture(params=["qwen2", "mistral", "gemma2", "gpt2"])
def architecture_pair(request):
    return pair(request.param)


@pytest.fixture(scope="module")
def view():
    return pair("qwen2")[1]


@pytest.fixture(scope="module")
def sampled(view):
    """Completions of 8 prompts x 3 with ends of both kinds, from one roomy call: the reference of the layout tests."""
    requests = requests_of(random_prompts(PROMPT_LENGTHS[:8], seed=3), 3)
    sampling = Sampling(LIMIT, temperature=1.3, top_p=0.95, stop_ids=(4, 9))
    groups, _ = generate(view, requests, sampling)
    assert {c.finish for group in groups for c in group} == {"stop", "length"}
    assert len({tuple(c.token_ids) for group in groups for c in group}) > 20
    return requests, sampling, groups


@pytest.mark.parametrize("cut", range(1, 9))
def test_completions_depend_neither_on_their_order_nor_on_which_call_they_are_part_of(view, sampled, cut):
    requests, sampling, groups = sampled
    order = random.Random(cut).sample(range(len(requests)), len(requests))
    turned = [Request(requests[i].prompt_ids, requests[i].keys[::-1]) for i in order]
    parts = [generate(view, part, sampling, max_slots=cut)[0] for part in (turned[:cut], turned[cut:])]
    assert_alike(parts[0] + parts[1], [groups[i][::-1] for i in order])


@pytest.mark.skipif(kernels.load() is None, reason="torch decodes every row")
@pytest.mark.parametrize("slots", [64, 5])
@pytest.mark.parametrize(
    "more", [{}, {"top_k": 9, "repetition_penalty": 1.1}, {"logprobs": "mask", "min_p": 0.1}], ids=str
)
def test_a_text_that_siblings_share_is_decoded_once(view, more, slots, monkeypatch):
    requests, computed, step = requests_of(random_prompts(PROMPT_LENGTHS), 6), [], CpuStep.__call__
    note = lambda *given: computed.append(len(step(*given))) or step(*given)  # noqa: E731
    monkeypatch.setattr(CpuStep, "__call__", note)
    sampling = Sampling(LIMIT, temperature=0.2, stop_ids=(4, 9), **more)
    groups, stats = generate(view, requests, sampling, max_slots=slots)
    beginnings = {(row, *c.token_ids[:n]) for row, g in enumerate(groups) for c in g for n in range(len(c.token_ids))}
    assert len(beginnings) < 0.9 * stats.rows and len(beginnings) <= sum(computed) < stats.rows
    assert sum(computed) == len(beginnings) or slots < 60, "all begin together"
    monkeypatch.setattr(decoder.Decoder, "_alike", lambda *_: None)
    assert_alike(groups, generate(view, requests, sampling, max_slots=slots)[0])


def test_another_step_gives_other_completions_of_the_same_prompts(view, sampled):
    requests, sampling, groups = sampled
    prompts = [request.prompt_ids for request in requests]
    others, _ = generate(view, requests_of(prompts, 3, step=1), sampling)
    same = sum(a == b for x, y in zip(tokens(groups), tokens(others), strict=True) for a, b in zip(x, y, strict=True))
    assert same <= 2  # two short ones may agree by chance


def test_a_limit_cuts_and_a_stop_token_ends_and_belongs_to_the_completion(view):
    requests = requests_of(random_prompts(PROMPT_LENGTHS), 3)
    free, _ = generate(view, requests, Sampling(LIMIT))
    assert all(len(c.token_ids) == len(c.logp) == LIMIT and c.finish == "length" for group in free for c in group)
    stop_ids = (free[0][0].token_ids[0], free[0][1].token_ids[7], free[1][0].token_ids[LIMIT - 1])
    stopped, stats = generate(view, requests, Sampling(LIMIT, stop_ids=stop_ids))
    for group, whole in zip(stopped, free, strict=True):
        for completion, uncut in zip(group, whole, strict=True):
            ends = [i + 1 for i, token in enumerate(uncut.token_ids) if token in stop_ids]
            assert completion.token_ids == uncut.token_ids[: min(ends, default=LIMIT)]
            assert completion.finish == ("stop" if ends else "length")
    assert len(stopped[0][0].token_ids) == 1
    assert len({len(c.token_ids) for group in stopped for c in group}) > 4
    assert stats.rows == sum(len(c.token_ids) for group in stopped for c in group)


def test_a_stop_token_at_the_limit_is_a_stop(view):
    [request] = requests_of(random_prompts([5]), 1)
    [[free]], _ = generate(view, [request], Sampling(3))
    last = free.token_ids[-1]
    assert last not in free.token_ids[:-1]
    [[stopped]], _ = generate(view, [request], Sampling(3, stop_ids=(last,)))
    assert (stopped.token_ids, stopped.finish) == (free.token_ids, "stop")


def test_a_stop_token_in_the_prompt_ends_nothing(view):
    request = Request([4, 9, 4], [stream_key(1)])
    [[completion]], _ = generate(view, [request], Sampling(LIMIT, stop_ids=(4, 9)))
    [[free]], _ = generate(view, [request], Sampling(LIMIT))
    assert len(completion.token_ids) >= 1 and completion.token_ids == free.token_ids[: len(completion.token_ids)]


def test_cost_follows_the_tokens_and_not_batch_times_longest(view, sampled):
    requests, sampling, groups = sampled
    lengths = [len(c.token_ids) for group in groups for c in group]
    _, wide = generate(view, requests, sampling, max_slots=100)
    assert (wide.steps, wide.rows) == (max(lengths), sum(lengths))
    # With one slot every step is one token; with a few, a slot is refilled as soon as it is free.
    _, single = generate(view, requests, sampling, max_slots=1)
    assert (single.steps, single.rows) == (sum(lengths), sum(lengths))
    _, few = generate(view, requests, sampling, max_slots=4)
    assert few.rows == sum(lengths)
    assert few.steps <= sum(lengths) / 4 + max(lengths)


def test_a_prompt_is_read_once_for_its_whole_group_even_when_the_group_does_not_fit(view, monkeypatch):
    monkeypatch.setattr(decoder, "_SHORT", 0)
    with shapes_of_forwards(view.base_model) as rows:
        _, stats = generate(view, requests_of(random_prompts([5, 9, 3]), 8), Sampling(4), max_slots=3)
    # One row of all prompts but for their last tokens.
    assert sum(width for n, width in rows if width > 1) == 4 + 8 + 2
    assert stats.prefills == 3
    assert stats.rows == 3 * 8 * 4


@pytest.mark.parametrize("budget, given", [(1, True), (16, True), (40, True), (100, True), (16, False)])
def test_prefills_keep_their_token_budget(view, budget, given, monkeypatch):
    monkeypatch.setitem(PREFILL_TOKENS, "cpu", 10_000 if given else budget)
    monkeypatch.setattr(decoder, "_SHORT", 0)
    requests, asked = requests_of(random_prompts(PROMPT_LENGTHS), 1), budget if given else None
    # The first call of all tries the kernels on rows of its own.
    generate(view, requests, Sampling(1))
    with shapes_of_forwards(view.base_model) as shapes:
        generate(view, requests, Sampling(1), prefill_tokens=asked)
    # Steps have a row for each sequence, prefills one for all.
    prefills = [width for n, width in shapes if n == 1]
    assert all(width <= budget for width in prefills)
    assert sum(prefills) == sum(PROMPT_LENGTHS) - len(PROMPT_LENGTHS)


def test_long_prompts_are_read_in_pieces_exactly(architecture_pair):
    _, view = architecture_pair
    prompts = random_prompts([50, 3, 37])
    sampling = Sampling(LIMIT, temperature=GREEDY)
    whole, _ = generate(view, requests_of(prompts, 2), sampling)
    for budget in (1, 7, 16, 36):
        pieces, _ = generate(view, requests_of(prompts, 2), sampling, prefill_tokens=budget)
        assert_alike(pieces, whole)


def test_memory_follows_the_tokens_and_not_the_limit(view, monkeypatch):
    monkeypatch.setattr(loops, "PAGE", 4)
    prompts = random_prompts([3, 30, 11])
    stop_ids = tuple(range(0, VOCABULARY, 6))
    requests = requests_of(prompts, 4)
    groups, stats = generate(view, requests, Sampling(100_000, stop_ids=stop_ids))
    _, least = generate(view, requests, Sampling(100, stop_ids=stop_ids))
    assert all(c.finish == "stop" for group in groups for c in group)
    assert stats.peak_cache_bytes == least.peak_cache_bytes
    token_bytes = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head_dim, float32
    entries = [len(prompt) + 4 * 4 + sum(len(c.token_ids) + 4 for c in group)
               for prompt, group in zip(prompts, groups, strict=True)]  # fmt: skip
    assert stats.peak_cache_bytes <= sum(entries) * token_bytes


def test_a_group_shares_the_pages_of_its_prompt(view, monkeypatch):
    monkeypatch.setattr(loops, "PAGE", 4)
    [prompt] = random_prompts([81])
    _, one = generate(view, requests_of([prompt], 1), Sampling(1))
    _, eight = generate(view, requests_of([prompt], 8), Sampling(1))
    page_bytes = 4 * 2 * 2 * 2 * 8 * 4
    assert one.peak_cache_bytes == 21 * page_bytes
    assert eight.peak_cache_bytes == (20 + 8) * page_bytes


def gib(tokens, pages=1):
    """`cache_gb` that holds so many tokens of the `view` model."""
    return tokens * 2 * 2 * 2 * 8 * 4 * 1.0001 / 2**30


def test_when_pages_run_out_sequences_go_back_and_come_out_the_same(view, sampled, monkeypatch):
    monkeypatch.setattr(loops, "PAGE", 4)
    requests, sampling, groups = sampled
    roomy, _ = generate(view, requests, sampling, cache_gb=gib(5000))
    # The longest prompt and completion take 19 + 24 tokens.
    for room, squeezed in ((5000, False), (300, True), (120, True), (56, True)):
        again, stats = generate(view, requests, sampling, cache_gb=gib(room))
        assert_alike(again, groups)
        # The kernel that decodes also reads again.
        assert again == roomy or kernels.load() is None
        assert (stats.preempted > 0) == squeezed
        assert stats.peak_cache_bytes <= gib(room) * 2**30
        # What is redone is read, not sampled again.
        assert stats.rows == sum(len(c.token_ids) for group in groups for c in group)


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_number_it_takes(view):
    with pytest.raises(UserError, match=r"rollout\.cache_gb: .* GiB hold 0 tokens .* need .* GiB: give more"):
        generate(view, requests_of(random_prompts([19]), 1), Sampling(100), cache_gb=gib(20))


def test_completions_are_handed_on_as_soon_as_they_are_finished(view, sampled):
    requests, sampling, groups = sampled
    seen = []
    again, _ = generate(view, requests, sampling, on_finish=lambda *finished: seen.append(finished))
    assert {(i, k) for i, k, _ in seen} == {(i, k) for i, group in enumerate(groups) for k in range(len(group))}
    assert len(seen) == 24 and all(again[i][k] is completion for i, k, completion in seen)
    lengths = [len(completion.token_ids) for _, _, completion in seen]
    assert lengths == sorted(lengths), "all started together: the shortest comes first"


def test_each_completion_can_have_a_limit_of_its_own(view):
    requests = requests_of(random_prompts([5, 9]), 3)
    free, _ = generate(view, requests, Sampling(LIMIT))
    limits = [[1, 7, 30], [3, 2, 24]]
    short, _ = generate(
        view, [replace(r, limits=own) for r, own in zip(requests, limits, strict=True)], Sampling(LIMIT)
    )
    for group, whole, own in zip(short, free, limits, strict=True):
        assert [len(c.token_ids) for c in group] == own
        for completion, uncut, limit in zip(group, whole, own, strict=True):
            common = min(limit, LIMIT)
            assert completion.token_ids[:common] == uncut.token_ids[:common]


def test_a_stop_string_ends_with_the_token_that_completes_it(view):
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

    def text(token_ids):
        return "".join(alphabet[token] for token in token_ids)

    requests = requests_of(random_prompts(PROMPT_LENGTHS), 3)
    free, _ = generate(view, requests, Sampling(LIMIT, temperature=1.4))
    string = text(free[0][0].token_ids[5:8])
    sampling = Sampling(LIMIT, temperature=1.4, stop_strings=("#", string, alphabet[free[1][0].token_ids[3]]))
    stopped, _ = generate(view, requests, sampling, decode=text)
    for group, whole in zip(stopped, free, strict=True):
        for completion, uncut in zip(group, whole, strict=True):
            full = text(uncut.token_ids)
            ends = [i + len(s) for s in sampling.stop_strings if (i := full.find(s)) >= 0]
            assert text(completion.token_ids) == full[: min(ends, default=LIMIT)]
            assert completion.finish == ("stop" if ends else "length")
    assert len(stopped[0][0].token_ids) == 8
    late, _ = generate(view, requests, replace(sampling, min_tokens=12), decode=text)
    assert all(len(c.token_ids) >= 12 for group in late for c in group)


def test_long_sequences_outgrow_the_first_allocation_unharmed():
    """Beyond several pages."""
    model, view = pair("qwen2")
    [prompt] = random_prompts([40])
    groups, _ = generate(view, [Request(prompt, [1, 2])], Sampling(150, temperature=1.2))
    for completion in groups[0]:
        assert len(completion.token_ids) == 150
        assert completion.logp == pytest.approx(training_logp(model, prompt, completion.token_ids, 1.2), abs=1e-4)


def test_weights_keep_no_graph_and_get_no_gradient(view):
    groups, _ = generate(view, requests_of(random_prompts([4]), 1), Sampling(2))
    assert isinstance(groups[0][0].logp[0], float)
    assert all(parameter.grad is None for parameter in view.parameters())


def test_a_text_that_is_cut_ends_with_a_whole_character(view):
    """Tokens stand for bytes of a text in several scripts, whichever they are."""
    written = "añ日本語שלום🚀é" * 4  # noqa: RUF001

    def text(token_ids):
        return written.encode()[: len(token_ids)].decode(errors="replace")

    for limit in range(1, 30):
        [[completion]], _ = generate(view, [Request([1, 2], [limit])], Sampling(limit), decode=text)
        assert completion.finish == "length" and written.startswith(completion.text)
        assert limit - 4 < len(completion.text.encode()) <= limit
