"""Completions of several turns: what is given between them is read behind what the cache holds, and changes nothing
else, whatever the layout, the memory and the delays."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import assert_alike, generate, generate_by_transformers
from experts_used import differing, experts_used
from hypothesis import given
from hypothesis import strategies as st
from scripted_turns import Scripted, logp_of_training
from tiny_models import ARCHITECTURES, STATES, VOCABULARY, build, pair, tiny_config

from hybrid_grpo.generation import GREEDY, Request, Sampling, decoder, scheduler, stream_key
from hybrid_grpo.generation import loop as loops
from hybrid_grpo.generation.shape_probe import geometry_of
from hybrid_grpo.model.attention import ATTENTION

MINIATURE = build(tiny_config("llama", hidden=8, layers=1, num_attention_heads=2, num_key_value_heads=1), ATTENTION)


def turns_of(completion):
    """The sampled tokens of every turn."""
    places = [0, *(place for place, _ in completion.observations), len(completion.token_ids)]
    return [completion.token_ids[begin:end] for begin, end in itertools.pairwise(places)]


def cut(completion, prompt, turn_limit, most):
    """What is left of a completion, sampled without these limits, under them."""
    sampled, given, read = [], [], prompt
    answers = [*(ids for _, ids in completion.observations), None]
    for turn, answer in zip(turns_of(completion), answers, strict=True):
        kept = turn[: min(turn_limit, most - read)]
        sampled, read = sampled + kept, read + len(kept)
        if len(kept) < len(turn) or read == most or (answer and read + len(answer) >= most):
            return sampled, tuple(given), "length"
        if answer is not None:
            given, read = [*given, (len(sampled), answer)], read + len(answer)
    return sampled, tuple(given), completion.finish


def test_the_shortest_completion_is_that_of_all_turns_for_stop_ids_and_stop_strings():
    """Stop strings were ignored again at the beginning of every turn."""
    keys = [stream_key(5, k) for k in range(8)]

    def text(token_ids):
        return "".join(chr(97 + token % 7) for token in token_ids)

    for ends in ({"stop_strings": ("a",)}, {"stop_ids": tuple(range(0, VOCABULARY, 7))}):
        sampling = Sampling(40, min_tokens=12, **ends)
        [group], _ = generate(
            MINIATURE, [Request([7, 8], keys, max_total_tokens=200)], sampling, turns=Scripted(4), decode=text
        )
        several = [turns_of(completion) for completion in group if completion.turns > 1]
        assert several and all(len(turns[0]) >= 12 for turns in several)
        assert min(len(turn) for turns in several for turn in turns[1:]) < 12


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logp_of_every_turn_is_that_of_a_forward_over_all_that_was_read(architecture):
    plain, view = pair(architecture)
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (1, 6, 17, 3)]
    requests = [
        Request(p, [stream_key(3, row, k) for k in range(3)], max_total_tokens=70) for row, p in enumerate(prompts)
    ]
    sampling = Sampling(24, stop_ids=tuple(range(20)))
    groups, stats = generate(view, requests, sampling, max_slots=5, turns=Scripted(4, (0, 3, 8)), decode=str)
    plainly, _ = generate_by_transformers(plain, requests, sampling, max_slots=5, turns=Scripted(4), decode=str)
    assert_alike(groups, plainly, 1e-4 if architecture in STATES else 2e-5, sidecars=False)
    several = [c for group in groups for c in group if c.turns > 2]
    assert len(several) >= 3
    # Of states there are only some more rows than slots: who finds none is read again.
    assert stats.answers >= (0.8 if architecture in STATES else 1) * sum(c.turns - 1 for c in several)
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert completion.logp == pytest.approx(logp_of_training(plain, prompt, completion), abs=1e-4)
            last = completion.token_ids[completion.observations[-1][0] if completion.observations else 0 :]
            assert completion.text == str(last)


TOKENS = st.integers(0, VOCABULARY - 1)


@given(
    prompts=st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=9), st.integers(1, 4)), max_size=6),
    sampling=st.builds(
        Sampling,
        max_tokens=st.integers(1, 12),
        stop_ids=st.lists(TOKENS, max_size=40).map(tuple),
        max_turn_tokens=st.integers(1, 12),
        temperature=st.sampled_from([GREEDY, 0.8, 1.5]),
        top_k=st.sampled_from([0, 30]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.05]),
        min_tokens=st.integers(0, 3),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        logit_bias=st.sampled_from([(), ((3, 2.0), (5, -1.0))]),
        logprobs=st.sampled_from(["softmax", "sampling", "mask"]),
    ),
    turns=st.integers(0, 5),
    delays=st.sampled_from([(0,), (0, 1, 5), (2, 30)]),
    room=st.integers(1, 30),
    limits=st.lists(st.integers(1, 12), min_size=24, max_size=24),
    max_slots=st.integers(1, 9),
    prefill_tokens=st.integers(1, 30),
    page=st.sampled_from([1, 2, 5, 32]),
    spare_pages=st.integers(0, 12),
    lag=st.integers(0, 3),
)
def test_no_completion_is_lost_doubled_or_changed(
    prompts, sampling, turns, delays, room, limits, max_slots, prefill_tokens, page, spare_pages, lag
):
    """Whatever the layout, however little memory, with and without turns: each is what it is alone. `generate` itself
    asserts that every page came back."""
    requests = [
        Request(prompt, [stream_key(row, k) for k in range(samples)], limits[4 * row :][:samples])
        for row, (prompt, samples) in enumerate(prompts)
    ]
    if turns:
        requests = [
            replace(request, limits=None, max_total_tokens=len(request.prompt_ids) + room) for request in requests
        ]
    else:
        sampling = replace(sampling, max_turn_tokens=Sampling.max_turn_tokens)
    needs = [-(-(len(r.prompt_ids) + (room if turns else max(r.limits))) // page) + 3 for r in requests]
    cache_gb = (max(needs, default=1) + spare_pages) * page * 2 * 1 * 4 * 4 * 1.0001 / 2**30
    layout = {"max_slots": max_slots, "prefill_tokens": prefill_tokens, "cache_gb": cache_gb}
    finished = Counter()
    with pytest.MonkeyPatch.context() as patch:
        # In pages of the same size: others round differently, and a draw on the edge gives another token.
        patch.setattr(loops, "PAGE", page)

        def generated(requests, delays, **layout):
            spoken = {"turns": Scripted(turns, delays)} if turns else {}
            return generate(MINIATURE, requests, sampling, **spoken, **layout)

        with pytest.MonkeyPatch.context() as lagging:
            lagging.setattr(decoder.Decoder, "max_in_flight", lag)
            note = lambda row, k, _: finished.update([(row, k)])  # noqa: E731
            groups, stats = generated(requests, delays, on_finish=note, **layout)
        alone = [
            generated([replace(request, keys=[key], limits=request.limits and [request.limits[k]])], (0,))[0][0][0]
            for request in requests
            for k, key in enumerate(request.keys)
        ]
    assert finished == Counter((row, k) for row, (_, samples) in enumerate(prompts) for k in range(samples))
    every = [completion for group in groups for completion in group]
    assert_alike(groups, [alone])
    if turns:
        for request, group in zip(requests, groups, strict=True):
            assert all(len(request.prompt_ids) + len(c.read_ids) <= request.max_total_tokens for c in group)
        assert all(len(c.token_ids) <= sampling.max_tokens and c.turns <= turns for c in every)
        assert all(len(turn) <= sampling.max_turn_tokens for c in every for turn in turns_of(c))
    if not lag:
        assert stats.rows == sum(len(c.token_ids) for c in every)
    assert stats.prefills >= len(requests)


@pytest.mark.parametrize(("turn_limit", "most"), [(3, 1000), (1000, 25), (5, 21)])
def test_limits_cut_what_is_sampled_and_change_nothing_before(turn_limit, most):
    plain, view = pair("llama")
    keys = [stream_key(5, k) for k in range(24)]
    sampling = Sampling(60, stop_ids=tuple(range(20)))
    [free], _ = generate(view, [Request([7, 8], keys, max_total_tokens=1000)], sampling, turns=Scripted(4))
    limited = replace(sampling, max_turn_tokens=turn_limit)
    for decoder_, model in ((generate, view), (generate_by_transformers, plain)):
        [group], _ = decoder_(model, [Request([7, 8], keys, max_total_tokens=most)], limited, turns=Scripted(4, (0, 2)))
        found = [(c.token_ids, c.observations, c.finish) for c in group]
        assert found == [cut(completion, 2, turn_limit, most) for completion in free]
        assert 3 < sum(finish == "length" for *_, finish in found) < 24


def test_who_waits_keeps_its_pages_and_gives_its_slot_to_others():
    """With room for all, nothing is read twice: neither prompts nor what was sampled."""
    requests = [Request([1, 2, 3], [stream_key(row)], max_total_tokens=200) for row in range(12)]
    sampling = Sampling(60, stop_ids=tuple(range(8)))
    groups, stats = generate(MINIATURE, requests, sampling, max_slots=2, turns=Scripted(4, (6,)))
    assert stats.prefills == len(requests)
    assert stats.preempted == 0
    # Two slots are busy while the others wait: hardly more steps than half the tokens.
    tokens = sum(len(c.token_ids) for group in groups for c in group)
    assert stats.answers > 20
    assert stats.steps < 0.7 * tokens


@pytest.mark.parametrize(("architecture", "pages"), [("qwen3_moe", 10), ("qwen3_next", None)])
def test_the_recorded_experts_are_those_of_a_forward_over_the_whole_text(architecture, pages):
    """Whatever pages a sequence lost, was given back or shares, and whoever answered between its turns."""
    config = tiny_config(architecture, num_experts=16, num_experts_per_tok=3)
    view, plain = build(config, ATTENTION), build(config)
    prompts = [[(5 * row + place) % VOCABULARY for place in range(3 + 11 * row)] for row in range(5)]
    requests = [
        Request(prompt, [stream_key(2, 0, row, k) for k in range(3)], max_total_tokens=220)
        for row, prompt in enumerate(prompts)
    ]
    turns = Scripted(3, delays=(0, 2, 9))
    cache_gb = pages and pages * 32 * geometry_of(view).token_bytes / 2**30
    settings = {"max_slots": 6, "prefill_tokens": 25, "cache_gb": cache_gb}
    groups, stats = generate(view, requests, Sampling(90, stop_ids=(3, 4)), turns=turns, **settings)
    assert stats.answers and bool(stats.preempted) == bool(pages)
    for prompt, group in zip(prompts, groups, strict=True):
        assert any(completion.observations for completion in group)
        for completion in group:
            (routing,) = completion.sidecars
            recorded = np.concatenate(routing.arrays())
            with torch.no_grad(), experts_used(plain) as used:
                plain(torch.tensor([(prompt + completion.read_ids)[:-1]]))
            assert len(routing.prompt) == len(prompt) and differing(used, recorded) == 0


def test_tokens_that_are_read_again_keep_the_experts_they_had(monkeypatch):
    """The log-probabilities that were recorded belong to them. Experts that no router would choose show it."""
    view = build(tiny_config("qwen3_moe", num_experts=16, num_experts_per_tok=3), ATTENTION)
    note = scheduler.Scheduler._save_recorded
    lost = {}

    def changed(self, holder):
        note(self, holder)
        if isinstance(holder, scheduler.Sequence) and holder.recorded is not None:
            holder.recorded = (holder.recorded + 1) % 16
            lost[holder.request, holder.sample] = holder.recorded

    monkeypatch.setattr(scheduler.Scheduler, "_save_recorded", changed)
    requests = [Request([row, 7, 9], [stream_key(2, 0, row, 0)]) for row in range(8)]
    cache_gb = 9 * 32 * geometry_of(view).token_bytes / 2**30
    groups, stats = generate(view, requests, Sampling(70), max_slots=8, cache_gb=cache_gb)
    assert stats.preempted and lost
    for (request, sample), experts in lost.items():
        (routing,) = groups[request][sample].sidecars
        assert (np.concatenate(routing.arrays())[: len(experts)] == experts).all()
