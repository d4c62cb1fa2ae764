"""Completions that a call leaves open go on in the next one as if they had never been interrupted."""

import random

import pytest
from decoders import assert_alike, generate
from tiny_models import STATES, VOCABULARY, build, tiny_config

from hybrid_grpo.data.completion_records import completion_of, record_of
from hybrid_grpo.generation import Journal, Request, Sampling, stream_key
from hybrid_grpo.generation import loop as loops
from hybrid_grpo.model.attention import ATTENTION

LEAST = 7
SAMPLINGS = {
    "plain": Sampling(24, stop_ids=tuple(range(0, VOCABULARY, 9))),
    "mask": Sampling(24, temperature=0.7, top_k=9, logprobs="mask", stop_ids=tuple(range(0, VOCABULARY, 9))),
    "penalty": Sampling(24, repetition_penalty=1.3, min_tokens=4, stop_strings=("b",)),
}


def text(token_ids):
    return "".join(chr(97 + token % 7) for token in token_ids)


def requests_of(begun=None):
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))] for _ in range(5)]
    groups = begun or [None] * len(prompts)
    return [
        Request(prompt, [stream_key(7, row, k) for k in range(3)], resumed_from=group)
        for row, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
    ]


@pytest.mark.parametrize("slots", [4, 64])
@pytest.mark.parametrize(
    ("architecture", "sampling"),
    [("llama", "plain"), ("gemma3_text", "mask"), ("llama", "penalty"), ("qwen3_moe", "plain"), (STATES[0], "mask")],
)
def test_an_open_completion_goes_on_where_it_was_left(architecture, sampling, slots, monkeypatch):
    """Also if some were not begun yet, after they went through a checkpoint, and with what was sampled after the least
    number of tokens taken away again."""
    monkeypatch.setattr(loops, "PAGE", 4)
    model, sampling = build(tiny_config(architecture), ATTENTION), SAMPLINGS[sampling]
    whole, _ = generate(model, requests_of(), sampling, decode=text)
    first, _ = generate(
        model, requests_of(), sampling, max_slots=slots, decode=text, should_stop=lambda least: least() >= LEAST
    )
    cut = [[completion.cut(LEAST) for completion in group] for group in first]
    open_rows = [c for group in cut for c in group if c.finish == "open"]
    assert all(len(c.token_ids) == len(c.logp) == LEAST for c in open_rows) and 3 < len(open_rows) < 15
    for group, others in zip(cut, whole, strict=True):
        for completion, other in zip(group, others, strict=True):
            if completion.finish == "open":
                assert completion.token_ids == other.token_ids[:LEAST]
                assert completion.sidecars == other.cut(LEAST).sidecars
            else:
                assert_alike([[completion]], [[other]])

    begun = [[completion_of(record_of(c)).carry() if c.finish == "open" else None for c in group] for group in cut]
    ended, _ = generate(model, requests_of(begun), sampling, max_slots=slots, decode=text)
    assert_alike(ended, whole)
    for group, before in zip(ended, begun, strict=True):
        for completion, open_one in zip(group, before, strict=True):
            assert completion.carried == ((LEAST,) if open_one else ())
            assert completion.policies == (2 if open_one else 1)


def test_a_completion_that_was_cut_before_its_first_token_begins_anew():
    model, sampling = build(tiny_config("qwen3_moe"), ATTENTION), SAMPLINGS["mask"]
    whole, _ = generate(model, requests_of(), sampling, decode=text)
    begun = [[completion.cut(0).carry() for completion in group] for group in whole]
    again, _ = generate(model, requests_of(begun), sampling, decode=text)
    assert_alike(again, whole)
    assert all(completion.policies == 1 for group in again for completion in group)


def test_the_journal_has_only_what_has_ended(tmp_path):
    model, sampling, journal = build(tiny_config("llama"), ATTENTION), SAMPLINGS["plain"], Journal(tmp_path, 0)
    journal.bind("x")
    told = []

    def sample(requests, on_finish):
        return generate(model, requests, sampling, on_finish=on_finish, should_stop=lambda least: least() >= LEAST)

    groups, _ = journal.complete(1, requests_of(), lambda *place: told.append(place[:2]), sample)
    ended = [(p, k) for p, group in enumerate(groups) for k, c in enumerate(group) if c.finish != "open"]
    assert sorted(told) == ended and 0 < len(ended) < 15
    again = Journal(tmp_path, 0)
    again.bind("x")
    keys = [key for request in requests_of() for key in request.keys]
    begun = {key: c for key, c in zip(keys, (c for g in groups for c in g), strict=True) if c.finish == "open"}
    asked = []

    def rest(requests, on_finish):
        asked.extend((request.keys, request.resumed_from) for request in requests)
        return generate(model, requests, sampling, on_finish=on_finish)

    groups, _ = again.complete(1, requests_of(), None, rest, resumed_from=begun)
    assert {key for of, _ in asked for key in of} == begun.keys(), "what the journal has is not sampled again"
    assert all(list(map(begun.get, of)) == had for of, had in asked)
    whole, _ = generate(model, requests_of(), sampling)
    assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in whole]
