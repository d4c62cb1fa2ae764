import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCABULARY, build, tiny_config

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.data.packing import pack, pad, plan_rows
from hybrid_grpo.model.attention import ATTENTION, routed_attention
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.model.support import SamplingMask

CPU = torch.device("cpu")
GROUPS = st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=1, max_size=6)), max_size=6)
"""Tokens of each prompt, and of its completions."""
SHARE = st.sampled_from(["auto", "on", "off"])


def rollout(groups, zeros=False):
    """Prompts and completions of every row; prompts differ in their first token, and a prompt's completions too."""
    rng = random.Random(0)
    token = (lambda: 0) if zeros else (lambda: rng.randrange(1, 60))
    prompts, completions = [], []
    for number, (prompt, lengths) in enumerate(groups):
        ids = [number, *(token() for _ in range(prompt - 1))]
        prompts += [ids] * len(lengths)
        completions += [[number * (not zeros), *(token() for _ in range(n - 1))] for number, n in enumerate(lengths)]
    return prompts, completions


def ragged(groups=7, size=4, seed=0):
    rng = random.Random(seed)
    return rollout([(rng.randint(1, 12), [rng.randint(1, 20) for _ in range(size)]) for _ in range(groups)])


def token_rows(prompts, completions, rows=None):
    every = TokenRow.of(prompts, completions)
    return every if rows is None else [every[row] for row in rows]


def packed(prompts, completions, budget, share, rows=None):
    return pack(token_rows(prompts, completions, rows), budget, CPU, share=share)


def padded(prompts, completions, budget, rows=None):
    return pad(token_rows(prompts, completions, rows), budget, CPU)


def sizes(batches):
    """Tokens that each computes."""
    return [micro.input_ids_bS.numel() for micro in batches]


def prompts_in(micro):
    """How often a prompt is computed."""
    return int((micro.position_ids == 0).sum())


def seen(micro):
    """bool [N, N]: the tokens that each token of a packed row attends to, by what equal attention to them gives."""
    n = micro.input_ids_bS.numel()
    equal, one_each = torch.zeros(n, 1, n), torch.eye(n)[:, None]
    equal, one_each = (tensor.transpose(0, 1)[None] for tensor in (equal, one_each))
    return routed_attention(None, equal, equal, one_each, scaling=1.0, batch=micro.segments)[0][0, :, 0] > 0


def assert_stands(micro, prompts, completions):
    """Sources, targets, positions and masks are those of its rows."""
    ids, positions = micro.input_ids_bS.flatten(), micro.position_ids.flatten()
    assert ids.dtype == positions.dtype == micro.target_N.dtype == torch.int64 and micro.mask_bT.dtype == torch.bool
    assert micro.mask_bT.shape == (len(micro.rows), max(len(completions[row]) for row in micro.rows))
    target_bT = micro.unflatten(micro.target_N)
    place_bT = micro.unflatten(micro.source(torch.arange(len(ids))))
    seen_NN = None if micro.segments is None else seen(micro)
    for i, row in enumerate(micro.rows):
        text, first, length = prompts[row] + completions[row], len(prompts[row]), len(completions[row])
        assert micro.mask_bT[i].tolist() == [t < length for t in range(micro.mask_bT.shape[1])]
        assert target_bT[i, :length].tolist() == completions[row]
        places = place_bT[i, :length]
        assert ids[places].tolist() == text[first - 1 : -1]
        assert positions[places].tolist() == list(range(first - 1, len(text) - 1))
        if seen_NN is not None:
            for place, before in zip(places, seen_NN[places], strict=True):
                in_order = before.nonzero()[:, 0][positions[before].argsort()]
                assert positions[in_order].tolist() == list(range(int(positions[place]) + 1))
                assert ids[in_order].tolist() == text[: len(in_order)], "the row up to itself, and nothing else"


@given(groups=GROUPS, budget=st.integers(1, 150), share=SHARE)
def test_every_row_is_packed_once_within_the_budget(groups, budget, share):
    prompts, completions = rollout(groups)
    batches = packed(prompts, completions, budget, share)
    assert sorted(row for micro in batches for row in micro.rows) == list(range(len(prompts)))
    for micro in batches:
        assert micro.input_ids_bS.shape == micro.position_ids.shape == (1, micro.input_ids_bS.numel())
        assert micro.input_ids_bS.numel() <= budget or len(micro.rows) == 1
        assert_stands(micro, prompts, completions)


@given(groups=GROUPS, more=st.integers(0, 50))
def test_a_prompt_is_computed_once_a_group_where_it_is_shared_and_else_once_a_row(groups, more):
    prompts, completions = rollout(groups)
    budget = more + max((prompt + sum(lengths) for prompt, lengths in groups), default=1)
    apart, together = (packed(prompts, completions, budget, share) for share in ("off", "on"))
    assert sum(map(prompts_in, apart)) == len(prompts)
    assert sum(map(prompts_in, together)) == len(groups)
    own = sum(map(len, completions)) - len(completions)
    assert sum(sizes(apart)) == sum(map(len, prompts)) + own
    assert sum(sizes(together)) == sum(prompt for prompt, _ in groups) + own


@given(seed=st.integers(0, 10**6), shortest=st.integers(1, 12), budget=st.integers(1, 300))
def test_rows_share_what_they_begin_with(seed, shortest, budget):
    """Rows branch anywhere, in prompts and behind them. Where one token is enough, no beginning is computed twice."""
    draw, texts = random.Random(seed), [[1, 2]]
    for _ in range(draw.randint(1, 12)):
        known = draw.choice(texts)
        texts.append(known[: draw.randint(1, len(known))] + [draw.randint(3, 5) for _ in range(draw.randint(1, 20))])
    cuts = [draw.randint(1, len(text) - 1) for text in texts]
    prompts = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    completions = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid_grpo.data.packing._SHORTEST", shortest)
        batches, [whole] = packed(prompts, completions, budget, "on"), packed(prompts, completions, 10_000, "on")
    assert sorted(row for micro in batches for row in micro.rows) == list(range(len(texts)))
    for micro in [*batches, whole]:
        assert_stands(micro, prompts, completions)
        assert micro.input_ids_bS.numel() <= budget or len(micro.rows) == 1 or micro is whole
    if shortest == 1:
        beginnings = {tuple(text[:end]) for text in texts for end in range(1, len(text))}
        assert whole.input_ids_bS.numel() == len(beginnings)


@given(groups=GROUPS.filter(len), budget=st.integers(1, 150), share=st.sampled_from(["on", "off"]))
def test_micro_batches_are_balanced(groups, budget, share):
    prompts, completions = rollout(groups)
    weights = [prompt + length - 1 for prompt, lengths in groups for length in lengths]
    if share == "on":
        weights = [prompt + sum(lengths) - len(lengths) for prompt, lengths in groups]
        budget = max(budget, *weights)
    found = sizes(packed(prompts, completions, budget, share))
    assert max(found) <= min(found) + max(weights)
    # A row that is longer than the budget takes the place of one that fills it.
    fewest = -(-sum(min(weight, budget) for weight in weights) // budget)
    assert fewest <= len(found) <= len(weights)


@given(
    groups=st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=3, max_size=3))),
    budget=st.integers(1, 150),
    share=SHARE,
    taken=st.sets(st.integers(0, 40)),
)
def test_rows_that_belong_together_are_not_separated(groups, budget, share, taken):
    prompts, completions = rollout(groups)
    rows = sorted(taken & set(range(len(prompts))))
    given = token_rows(prompts, completions, rows), budget, CPU
    for batches in (pack(*given, share=share, together=3), pad(*given, together=3)):
        assert sorted(row for micro in batches for row in micro.rows) == rows
        for micro in batches:
            of_groups = {row // 3 for row in micro.rows}
            assert set(micro.rows) == {row for row in rows if row // 3 in of_groups}
            assert micro.input_ids_bS.numel() <= budget or len(of_groups) == 1
            assert_stands(micro, prompts, completions)


def test_a_group_over_the_budget_is_split():
    prompts, completions = rollout([(10, [11] * 6)])
    batches = packed(prompts, completions, 40, "on")
    assert [len(micro.rows) for micro in batches] == [3, 3]
    assert sizes(batches) == [40, 40] and list(map(prompts_in, batches)) == [1, 1]


@pytest.mark.parametrize(("length", "computed"), [(41, 90), (42, 102)])
def test_auto_shares_prompts_that_are_a_tenth_of_the_tokens_or_more(length, computed):
    """Two rows of 10 and 40 tokens: 100, of which a shared prompt saves 10; with 41 it is 10 of 102."""
    prompts, completions = rollout([(10, [length] * 2)])
    assert sum(sizes(packed(prompts, completions, 1000, "auto"))) == computed


def test_chosen_rows_share_what_they_have_in_common_and_keep_their_own_numbers():
    prompts, completions = ragged(groups=3)
    chosen = [7, 2, 11, 3, 4]
    [micro] = packed(prompts, completions, 1000, "on", rows=chosen)
    assert sorted(micro.rows) == sorted(chosen) and prompts_in(micro) == 3
    assert_stands(micro, prompts, completions)
    for micro in padded(prompts, completions, 40, rows=chosen):
        assert set(micro.rows) <= set(chosen)
        assert_stands(micro, prompts, completions)


@given(lengths=st.lists(st.integers(2, 60), max_size=40), budget=st.integers(1, 200))
def test_every_row_is_planned_once_within_the_budget_longest_first(lengths, budget):
    parts = plan_rows(lengths, [1] * len(lengths), budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        longest = max(lengths[row] for row in part)
        assert len(part) * longest <= budget or len(part) == 1
    in_order = [lengths[row] for part in parts for row in part]
    assert in_order == sorted(lengths, reverse=True)
    # A part is closed only when the next row does not fit.
    for part, following in pairwise(parts):
        assert (len(part) + 1) * lengths[part[0]] > budget
        assert lengths[part[-1]] >= lengths[following[0]]


def test_equal_lengths_keep_their_order_and_fill_the_budget_exactly():
    assert plan_rows([5] * 7, [1] * 7, budget=15) == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("budget", [1, 30, 75, 10_000])
def test_padded_tokens_and_masks_stand_where_they_belong(budget):
    prompts, completions = ragged()
    batches = padded(prompts, completions, budget)
    assert sorted(row for micro in batches for row in micro.rows) == list(range(len(prompts)))
    for micro in batches:
        texts = [(prompts[row] + completions[row])[:-1] for row in micro.rows]
        width = max(map(len, texts))
        assert micro.input_ids_bS.tolist() == [text + [0] * (width - len(text)) for text in texts], "to the right"
        assert micro.position_ids.tolist() == [list(range(width))] * len(texts)
        assert micro.segments is None
        assert len(texts) * width <= budget or len(texts) == 1
        assert_stands(micro, prompts, completions)


WAYS = [
    pytest.param(lambda p, c, budget: packed(p, c, budget, "on"), id="shared"),
    pytest.param(lambda p, c, budget: packed(p, c, budget, "off"), id="apart"),
    pytest.param(padded, id="padded"),
]


@pytest.mark.parametrize("way", WAYS[1:])
def test_masks_do_not_depend_on_token_values(way):
    """Padding is often the end-of-sequence token, and token 0 is often real: neither is a sign of anything."""
    groups = [(3, [9, 1, 4]), (1, [6]), (7, [2, 2, 13])]
    for mine, zeros in zip(way(*rollout(groups), 30), way(*rollout(groups, zeros=True), 30), strict=True):
        assert mine.rows == zeros.rows and torch.equal(mine.mask_bT, zeros.mask_bT)
        at = (micro.source(micro.position_ids.flatten()) for micro in (mine, zeros))
        assert torch.equal(*at)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_flow_through_unflatten_to_the_real_tokens(way):
    [micro] = way(*ragged(2), 10_000)
    flat = torch.zeros(len(micro.target_N), requires_grad=True)
    weights = torch.arange(micro.mask_bT.numel()).view(micro.mask_bT.shape).float()
    (micro.unflatten(flat) * weights).sum().backward()
    assert torch.equal(flat.grad, weights[micro.mask_bT])


@pytest.mark.parametrize("share", ["on", "off", None])
@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "gemma2", "mistral"])
@pytest.mark.parametrize("filtered", [False, True])
def test_given_tokens_are_read_and_nothing_else(architecture, share, filtered):
    """The gradient is that of a plain forward over each row alone, and does not know the given tokens as targets. With
    `filtered`, every token was drawn from a few; otherwise every other row has histories, which are read alone."""
    rng = random.Random(4)
    prompts, sampled = rollout([(4, [5, 9, 2]), (1, [7, 3])])
    completions = []
    for row, ids in enumerate(sampled):
        cuts = sorted(rng.sample(range(1, len(ids)), min(row, len(ids) - 1)))
        given = tuple((cut, [rng.randrange(1, 60) for _ in range(rng.randint(1, 6))]) for cut in cuts)
        completions.append(Completion(ids, [0.0] * len(ids), "stop", observations=given))
    others = [[rng.sample(range(VOCABULARY), rng.randint(0, 20)) for _ in ids] for ids in sampled]
    kept = [
        [sorted({token, *more}) for token, more in zip(*row, strict=True)] for row in zip(sampled, others, strict=True)
    ]
    for row, ids in enumerate(kept if filtered else ()):
        completions[row] = replace(completions[row], sidecars=(SamplingMask.of(list(map(np.array, ids))),))
    for row in () if filtered else (1, 3):
        given = ((0, prompts[row]), *completions[row].observations)
        completions[row] = replace(completions[row], observations=given, histories=tuple(range(0, len(given), row)))
    advantages = [torch.tensor([rng.random() for _ in ids]) for ids in sampled]
    model = build(tiny_config(architecture), "eager" if share is None else ATTENTION)
    plain = build(tiny_config(architecture), "eager")
    expected = torch.zeros(())
    rows = [part for row, completion in enumerate(completions) for part in completion.token_rows(row, prompts[row])]
    assert len(rows) == len(completions) + (0 if filtered else 2)
    for row in rows:
        logits = plain(torch.tensor([row.prompt + row.completion])).logits[0, len(row.prompt) - 1 : -1]
        for number, place in enumerate(row.targets, row.first):
            among = logits[place][kept[row.index][number]] if filtered else logits[place]
            gap = logits[place, row.completion[place]] - among.logsumexp(-1)
            expected = expected - advantages[row.index][number] * gap
    expected.backward()
    if share is None:
        batches = pad(rows, 40, CPU)
    else:
        batches = pack(rows, 40, CPU, share=share)
    total = torch.zeros(())
    for micro in batches:
        logp_bT = micro.unflatten(LogprobModel(model)(*micro.inputs, 1.0)[0])
        for row, logp_T in zip(micro.rows, logp_bT, strict=True):
            known = advantages[row][: len(logp_T)]
            total = total - (known * logp_T[: len(known)]).sum()
    assert sum(int(micro.mask_bT.sum()) for micro in batches) == sum(map(len, sampled))
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad - theirs.grad).abs().max() <= 1e-5 * theirs.grad.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_with_fewer_micro_batches_runs_fillers_that_give_nothing(way, monkeypatch):
    """The longest rank has 5; a process group is not needed to say so."""
    monkeypatch.setattr("hybrid_grpo.data.packing.all_reduce", lambda value, op: torch.full_like(value, 5))
    prompts, completions = rollout([(3, [9]), (2, [5])])
    batches = way(prompts, completions, 1)
    assert [len(micro.rows) for micro in batches] == [1, 1, 0, 0, 0]
    model = build(tiny_config("qwen2"), "eager" if batches[0].segments is None else ATTENTION)
    for filler in batches[2:]:
        logp_N, entropy_N = LogprobModel(model)(*filler.inputs, 1.0)
        assert filler.unflatten(logp_N).shape == (1, 1) and torch.isfinite(logp_N).all()
        ((logp_N + entropy_N).sum() * 0).backward()
        assert not any(parameter.grad.any() for parameter in model.parameters())


@given(groups=GROUPS, budget=st.integers(1, 150), share=SHARE, more=st.integers(0, 8))
def test_every_rank_has_as_many_micro_batches_as_the_one_with_most(groups, budget, share, more):
    prompts, completions = rollout(groups)
    alone = packed(prompts, completions, budget, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid_grpo.data.packing.all_reduce", lambda value, op: value + more)
        batches = packed(prompts, completions, budget, share)
    assert len(batches) == len(alone) + more
    assert sorted(row for micro in batches for row in micro.rows) == list(range(len(prompts)))
    assert max(sizes(batches), default=0) <= max(sizes(alone), default=1), "work is spread, not put off"
    assert all(micro.rows for micro in batches[: min(len(batches), len(set(map(tuple, prompts))))])


def test_no_rows_are_no_micro_batches():
    assert packed([], [], 10, "auto") == padded([], [], 10) == []
