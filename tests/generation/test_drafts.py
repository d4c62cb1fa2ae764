"""Drafts change how long a rollout takes, and nothing else."""

import random

import pytest
from cuda_graphs import Captures
from decoders import generate
from knowing_drafter import Knowing
from scripted_turns import Scripted
from tiny_models import STATES, VOCABULARY, build, tiny_config

from hybrid_grpo.generation import Drafter, Request, Sampling, stream_key
from hybrid_grpo.generation import loop as loops
from hybrid_grpo.generation.drafts import _Times
from hybrid_grpo.generation.sequence import Sequence
from hybrid_grpo.generation.state_pool import rows_for
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.kernels import states

SAMPLINGS = [
    Sampling(24),
    Sampling(24, temperature=0.0, stop_ids=(3, 5)),
    Sampling(24, temperature=0.7, top_k=9, logprobs="mask"),
    Sampling(24, min_p=0.05, stop_strings=("ab",), min_tokens=3, stop_ids=tuple(range(0, VOCABULARY, 9))),
]
SMALLER = {
    "qwen3_5_text": {
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention"]},
    }
}


def requests_of(rng, samples=3, most=None):
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))] for _ in range(5)]
    return [
        Request(p, [stream_key(7, row, k) for k in range(samples)], max_total_tokens=most)
        for row, p in enumerate(prompts)
    ]


def text(token_ids):
    return "".join(chr(97 + token % 3) for token in token_ids)


def same(groups, others, gap):
    for group, other in zip(groups, others, strict=True):
        for mine, theirs in zip(group, other, strict=True):
            assert (mine.token_ids, mine.finish, mine.observations) == (
                theirs.token_ids,
                theirs.finish,
                theirs.observations,
            )
            assert mine.sidecars == theirs.sidecars
            assert mine.logp == (theirs.logp if gap == 0 else pytest.approx(theirs.logp, abs=gap))


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("architecture", ["gemma3_text", "deepseek_v3", "qwen3_5_text", *STATES])
def test_completions_with_drafts_are_those_without(architecture, sampling, monkeypatch):
    """With few pages, so that sequences are preempted, and with answers of tools, too. Products of torch, which some of
    these models need, round otherwise with another number of rows, as do reading again what was preempted, and answers
    that are read beside others by layers with a state."""
    exact = architecture in ("gemma3_text", "qwen3_5_text")
    model = build(tiny_config(architecture, **SMALLER.get(architecture, {})), ATTENTION)
    monkeypatch.setattr(loops, "PAGE", 4)
    geometry = loops._prepared(model)
    small = (26 * 4 * geometry.token_bytes + rows_for(9, waiting=False) * geometry.state_bytes) / 2**30
    for seed, more in enumerate([{}, {"cache_gb": small}, {"turns": (4, (0, 3, 8))}]):
        requests = requests_of(random.Random(seed), most=90 if "turns" in more else None)

        def complete(drafter=None, requests=requests, more=more):
            turns = {"turns": Scripted(*more["turns"])} if "turns" in more else more
            return generate(model, requests, sampling, max_slots=9, decode=text, drafter=drafter, **turns)

        plain, before = complete()
        groups, stats = complete(Knowing(plain))
        read_again = "cache_gb" in more or ("turns" in more and geometry.states)
        same(groups, plain, 0 if exact and not read_again else 2e-5)
        # States take at most half of the memory: with little of it, most of these models decode few at a time.
        if not ("cache_gb" in more and geometry.states) or architecture == "lfm2":
            assert 0 < stats.accepted < stats.drafted and stats.steps < before.steps
            assert not ("cache_gb" in more and sampling == SAMPLINGS[0]) or stats.preempted


def test_penalties_and_states_that_torch_computes_take_no_drafts(monkeypatch):
    monkeypatch.setattr(states, "recurrent_delta_rule", lambda *_, **__: None)
    for architecture, sampling in [("qwen3_next", SAMPLINGS[0]), ("llama", Sampling(8, repetition_penalty=1.2))]:
        model, requests = build(tiny_config(architecture), ATTENTION), requests_of(random.Random(0))
        plain, _ = generate(model, requests, sampling)
        groups, stats = generate(model, requests, sampling, drafter=Knowing(plain))
        same(groups, plain, 0)
        assert stats.drafted == 0


@pytest.mark.usefixtures("torch_only")
def test_rows_of_drafts_run_as_graphs_of_the_sizes_that_there_are(monkeypatch):
    model, requests = build(tiny_config("qwen2"), ATTENTION), requests_of(random.Random(3))
    plain, _ = generate(model, requests, SAMPLINGS[0], max_slots=12)
    double = Captures()
    monkeypatch.setattr(loops, "capture_on", lambda _: double)
    groups, stats = generate(model, requests, SAMPLINGS[0], max_slots=12, drafter=Knowing(plain))
    same(groups, plain, 2e-5)
    assert stats.accepted > 0 and set(double.forwards) <= {1, 2, 4, 8, 12}


def sequence_of(tokens, sample=0, prompt=4, limit=100):
    return Sequence(0, sample, 0, list(tokens), prompt, limit, logp=[0.0] * (len(tokens) - prompt))


def drafter_of(group, times):
    drafter = Drafter()
    drafter.begin([group])
    for rows, seconds in times.items():
        drafter.record_time(rows, seconds, drafts=False)
    return drafter


FLAT = dict.fromkeys((1, 2, 4, 8, 16), 1.0)


def test_a_draft_is_what_followed_in_a_sibling_in_the_prompt_or_in_the_sequence_itself():
    prompt = [1, 2, 3, 4, 5, 6]
    sibling = sequence_of([*prompt, 10, 11, 12, 13, 14, 15], sample=0, prompt=6)
    for tokens, expected in [
        ([*prompt, 10, 11, 12], [13, 14, 15]),
        ([*prompt, 7, 2, 3, 4], [5, 6]),
        ([*prompt, 7, 8, 9, 7, 8, 9, 7, 8, 9], [7, 8, 9, 7]),
        ([*prompt, 20, 21, 22], []),
    ]:
        mine = sequence_of(tokens, sample=1, prompt=6)
        drafter = drafter_of([sibling, mine], FLAT)
        assert drafter.may_help(1, 16)
        drafts = drafter.propose([mine], 16)
        assert (drafts[0][: len(expected)] if drafts else []) == expected
    # It follows as tokens come, and looks again where it was wrong.
    drafter = drafter_of([sibling, mine], FLAT)
    mine.tokens[-1:] = [10, 11, 12, 13]
    assert drafter.propose([mine], 16) == [[14, 15]]
    mine.tokens += [14, 99, 2, 3, 4]
    assert drafter.propose([mine], 16)[0][:2] == [5, 6]


def test_drafts_are_as_long_as_they_pay():
    group = [sequence_of([*range(50)], sample=0), sequence_of([0, 1, 2, 3], sample=1)]
    mine = group[1]
    linear = {rows: 1.0 * rows for rows in FLAT}
    assert not drafter_of(group, linear).may_help(1, 16), "a row more costs as much as a step"
    assert not drafter_of(group, FLAT).may_help(16, 16), "there is no room"
    drafter = drafter_of(group, {1: 1.0, 2: 1.1, 4: 1.2, 8: 4.0, 16: 9.0})
    assert drafter.propose([mine], 16) == [[4, 5, 6]]
    for _ in range(40):
        drafter.record_verified(mine, 3, 0)
    assert drafter.propose([mine], 16) == [], "they never held"
    for _ in range(40):
        drafter.record_verified(mine, 3, 3)
    assert drafter.propose([mine], 16) == [[4, 5, 6]]
    for _ in range(200):
        drafter.record_time(4, 6.0, drafts=True)
    assert len(drafter.propose([mine], 16)[0]) == 1, "steps with drafts turn out to take long"


def test_a_step_of_a_size_that_has_not_been_seen_takes_what_is_between_its_neighbors():
    times = _Times()
    assert times.of(4) == 0.0
    times.add(2, 1.0)
    assert (times.of(1), times.of(8)) == (1.0, 4.0), "a smaller one takes no longer, a larger one as many small ones"
    times.add(16, 8.0)
    assert (times.of(4), times.of(8)) == (2.0, 4.0)


def test_where_nothing_repeats_a_drafter_looks_ever_more_rarely():
    rng = random.Random(0)
    mine = sequence_of([rng.randrange(10**6) for _ in range(8)])
    drafter = drafter_of([mine], FLAT)
    looked = []
    for step in range(2000):
        if drafter.may_help(1, 16):
            looked.append(step)
            assert drafter.propose([mine], 16) == []
        mine.tokens.append(rng.randrange(10**6))
    assert len(looked) < 150 and looked[-1] > 900


def test_long_texts_are_read_bit_by_bit():
    rng = random.Random(0)
    texts = [[rng.randrange(10**6) for _ in range(4500)] for _ in range(2)]
    one = sequence_of([1, 2, 3, 4, *texts[0]], limit=9999)
    two = sequence_of([1, 2, 3, 4, *texts[1], *texts[0][10:20]], sample=1, limit=9999)
    drafter = drafter_of([one, two], FLAT)
    drafts = [drafter.propose([two], 16) for _ in range(3)]
    assert drafts == [[], [], [texts[0][20:35]]], "its own text first, then that of the sibling"


def test_limits_end_a_sequence_that_has_a_draft():
    mine = sequence_of([1, 2, 3, 1, 2, 3, 1, 2, 3], prompt=4, limit=7)
    drafter = drafter_of([mine], FLAT)
    assert drafter.propose([mine], 16) == [[1]], "two tokens are left, one of them of the step itself"
