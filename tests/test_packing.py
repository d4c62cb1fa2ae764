import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_grpo.data.packing import pack, plan_rows

CPU = torch.device("cpu")


def ragged(rows, seed=0, longest=20):
    rng = random.Random(seed)
    texts = [[rng.randrange(1, 90) for _ in range(rng.randint(1, longest))] for _ in range(2 * rows)]
    return texts[:rows], texts[rows:]


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(2, 60), max_size=40), budget=st.integers(1, 200))
def test_every_row_is_planned_once_within_the_budget_longest_first(lengths, budget):
    parts = plan_rows(lengths, budget)
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


def test_a_row_longer_than_the_budget_is_a_part_of_its_own():
    assert plan_rows([4, 50, 3, 60], budget=10) == [[3], [1], [0, 2]]


def test_equal_lengths_keep_their_order_and_fill_the_budget_exactly():
    assert plan_rows([5] * 7, budget=15) == [[0, 1, 2], [3, 4, 5], [6]]


def test_no_rows_are_no_parts():
    assert plan_rows([], 10) == []


@pytest.mark.parametrize("budget", [1, 30, 75, 10_000])
def test_tokens_and_masks_stand_where_they_belong(budget):
    prompts, completions = ragged(23)
    batches = pack(prompts, completions, budget=budget, device=CPU)
    assert sorted(row for batch in batches for row in batch.rows) == list(range(23))
    for batch in batches:
        assert batch.input_ids_bS.dtype == torch.int64
        assert batch.target_mask_bS.dtype == batch.mask_bT.dtype == torch.bool
        lengths = [len(prompts[row]) + len(completions[row]) for row in batch.rows]
        assert batch.input_ids_bS.shape == batch.target_mask_bS.shape == (len(batch.rows), max(lengths))
        assert batch.mask_bT.shape == (len(batch.rows), max(len(completions[row]) for row in batch.rows))
        assert batch.input_ids_bS.numel() <= budget or len(batch.rows) == 1
        for i, row in enumerate(batch.rows):
            ids, target, mask = batch.input_ids_bS[i], batch.target_mask_bS[i], batch.mask_bT[i]
            assert ids[: lengths[i]].tolist() == prompts[row] + completions[row]
            assert not ids[lengths[i] :].any(), "padding is to the right"
            assert ids[target].tolist() == completions[row]
            assert target.nonzero()[:, 0].tolist() == list(range(len(prompts[row]), lengths[i]))
            assert mask.tolist() == [t < len(completions[row]) for t in range(len(mask))]


def test_masks_do_not_depend_on_token_values():
    """Padding is often the end-of-sequence token, and token 0 is often real: neither is a sign of anything."""
    prompts, completions = ragged(9, seed=4)
    other = [[0] * len(ids) for ids in prompts], [[0] * len(ids) for ids in completions]
    for mine, zeros in zip(
        pack(prompts, completions, budget=60, device=CPU), pack(*other, budget=60, device=CPU), strict=True
    ):
        assert mine.rows == zeros.rows
        assert torch.equal(mine.target_mask_bS, zeros.target_mask_bS) and torch.equal(mine.mask_bT, zeros.mask_bT)


def test_chosen_rows_keep_their_own_numbers():
    prompts, completions = ragged(12, seed=1)
    chosen = [7, 2, 11, 4]
    batches = pack(prompts, completions, budget=40, device=CPU, rows=chosen)
    assert sorted(row for batch in batches for row in batch.rows) == sorted(chosen)
    for batch in batches:
        for i, row in enumerate(batch.rows):
            assert batch.input_ids_bS[i][batch.target_mask_bS[i]].tolist() == completions[row]


def test_unflatten_puts_flat_values_back_in_their_rows():
    prompts, completions = ragged(17, seed=2)
    for batch in pack(prompts, completions, budget=90, device=CPU):
        flat = batch.input_ids_bS[batch.target_mask_bS].double()
        values = batch.unflatten(flat)
        assert values.dtype == torch.float64
        for i, row in enumerate(batch.rows):
            padding = values.shape[1] - len(completions[row])
            assert values[i].tolist() == completions[row] + [0.0] * padding
        assert torch.equal(values[batch.mask_bT], flat)


def test_gradients_flow_through_unflatten_to_the_real_tokens():
    prompts, completions = ragged(6, seed=3)
    [batch] = pack(prompts, completions, budget=10_000, device=CPU)
    flat = torch.zeros(int(batch.mask_bT.sum()), requires_grad=True)
    weights = torch.arange(batch.mask_bT.numel()).view(batch.mask_bT.shape).float()
    (batch.unflatten(flat) * weights).sum().backward()
    assert torch.equal(flat.grad, weights[batch.mask_bT])


def test_a_rank_with_fewer_micro_batches_runs_fillers_of_no_rows(monkeypatch):
    """The longest rank has 5; a process group is not needed to say so."""
    monkeypatch.setattr("hybrid_grpo.data.packing.all_reduce", lambda value, op: torch.full_like(value, 5))
    prompts, completions = ragged(2, seed=5)
    batches = pack(prompts, completions, budget=1, device=CPU)
    assert [len(batch.rows) for batch in batches] == [1, 1, 0, 0, 0]
    for filler in batches[2:]:
        # One token to score, not the first of its row: the forward runs as any other.
        assert filler.target_mask_bS.sum() == filler.mask_bT.sum() == 1 and not filler.target_mask_bS[:, 0].any()
        assert filler.unflatten(torch.tensor([3.0])).tolist() == [[3.0]]
