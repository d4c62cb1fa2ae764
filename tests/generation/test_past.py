"""Epochs that share random streams: the last one's completions are drafts, wherever they were sampled."""

import random
from dataclasses import replace

import pytest
import torch
from rank_threads import in_ranks
from tiny_models import VOCABULARY, build, tiny_config

from hybrid_grpo.data.batch import Completion, Prompt
from hybrid_grpo.generation import Drafter, Request, Sampling, generate, past, stream_key
from hybrid_grpo.generation.past import Past
from hybrid_grpo.generation.sequence import Sequence
from hybrid_grpo.model.attention import ATTENTION

CPU = torch.device("cpu")
LIMITS = [9, 12, 80]
FLAT = dict.fromkeys((1, 2, 4, 8, 16), 1.0)


def drawn(numbers, epoch=0, samples=2, source=""):
    """Requests for prompts of these numbers."""
    prompts = [Prompt(number, "", [1, 2, number % 7], {}, epoch, source) for number in numbers]
    return [Request(p.token_ids, [stream_key(epoch, p.id, k) for k in range(samples)], prompt=p) for p in prompts]


def ended(stream, sampled, sample=0):
    prompt = [1, 2, 3]
    completion = Completion(sampled, [0.0] * len(sampled), "stop")
    return Sequence(0, sample, 7, [*prompt, *sampled], 3, 99, shared=stream, completion=completion)


class Eager(Drafter):
    """Believes that a step takes as long with more rows."""

    def begin(self, groups):
        super().begin(groups)
        for rows, seconds in FLAT.items():
            super().took(rows, seconds, drafts=False)

    def took(self, rows, seconds, *, drafts):
        pass


@pytest.mark.parametrize("architecture, change, most", [
    ("qwen2", 0, 0.5), ("qwen2", 2e-4, 0.9), ("deepseek_v3", 1e-5, 0.9), ("gemma3_text", 2e-4, 0.7),
])  # fmt: skip
def test_an_epoch_under_a_similar_policy_takes_fewer_steps_and_samples_what_it_would_without(
    architecture, change, most
):
    rng = random.Random(2)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
    models = [build(tiny_config(architecture), ATTENTION) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=change)
    requests = [
        [
            Request(
                ids,
                [stream_key(epoch, row, k) for k in range(3)],
                LIMITS,
                shared=[stream_key(row, k) for k in range(3)],
            )
            for row, ids in enumerate(prompts)
        ]
        for epoch in range(2)
    ]
    drafter, sampling, found = Eager(), Sampling(99, top_k=20), []
    for model, of_epoch in zip(models, requests, strict=True):
        plain, before = generate(model, of_epoch, sampling, max_slots=16)
        groups, stats = generate(model, of_epoch, sampling, max_slots=16, drafter=drafter)
        assert [[c.token_ids for c in group] for group in groups] == [[c.token_ids for c in group] for group in plain]
        found.append((stats.steps / before.steps, stats.held))
    assert found[0][0] == 1 and found[0][1] < 5 and found[1][0] <= most and found[1][1] > 20
    unshared = [replace(request, shared=None) for request in requests[1]]
    other, _ = generate(model, unshared, sampling)
    assert [c.token_ids for group in other for c in group] != [c.token_ids for group in plain for c in group]


def test_the_draft_is_at_the_same_place_of_the_last_epoch_or_where_the_same_tokens_occurred():
    old = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
    for sampled, expected in [
        ([], old[:8]),
        (old[:4], old[4:10]),
        # A sibling had the same tokens too, but at another place.
        ([10, 11, 99, 13, 14, 15], old[6:]),
        # Moved by one place.
        ([99, 10, 11, 12], old[3:]),
        ([98, 97, 96, 95], []),
    ]:
        drafter = Drafter()
        drafter.past.keep([[ended(5, old), ended(6, [13, 14, 15, 50, 51, 52], sample=1)]])
        mine = Sequence(0, 0, 8, [1, 2, 3, *sampled], 3, 99, [0.0] * len(sampled), shared=5)
        drafter.begin([[mine, Sequence(0, 1, 9, [1, 2, 3], 3, 99, shared=6)]])
        for rows, seconds in FLAT.items():
            drafter.took(rows, seconds, drafts=False)
        drafts = drafter.propose([mine], 16)
        assert (drafts[0][: len(expected)] if drafts else []) == expected


def streams_of(requests):
    return [stream for request in requests for stream in request.shared]


def test_streams_are_those_of_the_prompt_and_its_draw_in_the_step():
    """A prompt that is drawn twice in a step has other streams the second time, in a later call too; sources have their
    own, and after some epochs there are new ones."""
    kept = Past()
    streams = streams_of(kept.with_streams([*drawn([4, 5]), *drawn([4], 1), *drawn([4], 0, source="b")], 0, 7, CPU))
    assert len(set(streams)) == 8
    assert streams_of(kept.with_streams([*drawn([4], 2), *drawn([5], 0)], 0, 7, CPU))[2:] == streams[2:4]
    assert not set(streams_of(kept.with_streams(drawn([4], 2), 0, 7, CPU))) & set(streams)
    assert streams_of(kept.with_streams([*drawn([4], 3), *drawn([5], 2)], 0, 8, CPU)) == streams[:4]
    assert past.EPOCHS > 3
    renewed = streams_of(kept.with_streams([*drawn([4], 3), *drawn([4], past.EPOCHS)], 0, 9, CPU))
    assert renewed[:2] == streams[:2] and not set(renewed[2:]) & set(streams)
    assert streams_of(kept.with_streams(drawn([4], past.EPOCHS + 1), 0, 10, CPU)) == renewed[2:]


def test_texts_come_from_the_rank_that_has_them():
    """Also to a rank that draws few prompts, and from one that draws none."""

    def program(rank):
        kept = Past()
        first = kept.with_streams([drawn([4, 5]), [*drawn([6]), *drawn([4], 1)], []][rank], 0, 1, CPU)
        kept.keep([[ended(stream, [rank, stream % 50]) for stream in request.shared] for request in first])
        second = kept.with_streams([drawn([6, 5], 1), [], drawn([4], 2)][rank], 0, 2, CPU)
        texts = [kept.text(ended(stream, [])) for stream in streams_of(second)]
        assert [text[4] for text in texts] == [stream % 50 for stream in streams_of(second)]
        return streams_of(first), [text[3] for text in texts], len(kept._texts)

    streams, origins, counts = zip(*in_ranks(3, program), strict=True)
    alone = Past().with_streams([*drawn([4, 5, 6]), *drawn([4], 1)], 0, 1, CPU)
    assert [stream for of_rank in streams for stream in of_rank] == streams_of(alone)
    assert origins == ([1, 1, 0, 0], [], [0, 0]) and sum(counts) == 8, "a text has one place"


def test_what_ended_is_kept_as_long_as_there_is_room(monkeypatch):
    kept = Past()
    # Tokens of pictures have up to 63 bits.
    kept.keep([[ended(1, [5, -(1 << 62), 6]), ended(None, [8])]])
    assert kept.text(ended(1, [])) == [1, 2, 3, 5, -1, 6]
    assert kept.text(ended(2, [])) == kept.text(ended(None, [])) == []
    monkeypatch.setattr(past, "MOST_BYTES", 2 * (past._BYTES_OF_A_TEXT + 16))
    kept.keep([[ended(stream, [stream] * 4)] for stream in (3, 1, 4)])
    assert [bool(kept.text(ended(stream, []))) for stream in (1, 3, 4)] == [True, False, True]
    assert kept._bytes == past.MOST_BYTES
