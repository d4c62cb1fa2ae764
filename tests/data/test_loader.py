import json
from itertools import chain

import pytest

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.loader import PromptLoader, rank_share


def global_batches(length: int, batch: int, count: int, world_size: int, seed: int = 3, shuffle: bool = True):
    ranks = [PromptLoader(range(length), batch, rank, world_size, seed, shuffle) for rank in range(world_size)]
    return [[item for loader in ranks for item, _ in loader.next_batch()] for _ in range(count)]


@pytest.mark.parametrize("length", [1, 5, 17, 60])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_global_batch_does_not_depend_on_the_number_of_ranks(length, shuffle):
    alone = global_batches(length, batch=12, count=15, world_size=1, shuffle=shuffle)
    for world_size in (2, 3, 12):
        assert global_batches(length, 12, 15, world_size, shuffle=shuffle) == alone


@pytest.mark.parametrize(("length", "batch"), [(10, 4), (10, 10), (3, 8), (24, 6)])
def test_every_row_comes_once_an_epoch_and_batches_run_across_epochs(length, batch):
    stream = list(chain.from_iterable(global_batches(length, batch, length * 2, world_size=2)))
    epochs = [stream[start : start + length] for start in range(0, len(stream), length)]
    assert len(epochs) == 2 * batch
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)


def test_epochs_differ_from_each_other_and_from_those_of_another_seed():
    epochs = global_batches(30, 30, 4, world_size=1)
    others = global_batches(30, 30, 4, world_size=1, seed=4)
    assert len({tuple(epoch) for epoch in [*epochs, *others]}) == 8


def test_two_draws_of_one_item_in_a_batch_come_from_different_epochs():
    batch = PromptLoader(range(3), 8, 0, 1, seed=0).next_batch()
    assert len(set(batch)) == 8 and [epoch for _, epoch in batch] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_without_shuffling_the_order_is_the_source_s():
    assert global_batches(5, 4, 3, world_size=2, shuffle=False) == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


@pytest.mark.parametrize("taken", [0, 1, 2, 5, 9])
def test_a_saved_position_goes_on_alike_on_any_number_of_ranks_and_with_any_batch(taken):
    one = PromptLoader(range(7), 6, 0, 1, seed=0)
    for _ in range(taken):
        one.next_batch()
    state = json.loads(json.dumps(one.state_dict()))
    assert state["epoch"] * 7 + state["offset"] == taken * 6
    ahead = [item for _ in range(4) for item in one.next_batch()]

    ranks = [PromptLoader(range(7), 12, rank, 3, seed=0) for rank in range(3)]
    for loader in ranks:
        loader.next_batch()  # a stale position must not show through
        loader.load_state_dict(state)
    assert [item for _ in range(2) for loader in ranks for item in loader.next_batch()] == ahead
    assert len({json.dumps(loader.state_dict()) for loader in ranks}) == 1


@pytest.mark.parametrize("other", [(range(8), 1, True), (range(12), 1, False), (range(9), 2, True)])
def test_a_position_goes_over_to_other_rows_another_seed_and_another_order(other):
    """run.allow_changes was said to accept them, and the loader refused them after the model had been loaded."""
    saved = PromptLoader(range(9), 3, 0, 1, seed=1)
    for _ in range(5):
        saved.next_batch()
    rows, seed, shuffle = other
    resumed, fresh = (PromptLoader(rows, 3, 0, 1, seed=seed, shuffle=shuffle) for _ in range(2))
    resumed.load_state_dict(saved.state_dict())
    for _ in range(5):
        fresh.next_batch()
    assert [resumed.next_batch() for _ in range(6)] == [fresh.next_batch() for _ in range(6)]


def test_a_position_of_rows_drawn_in_another_way_is_refused():
    with pytest.raises(UserError, match=r"^data: the checkpoint drew rows in another way: resume with"):
        PromptLoader(range(9), 3, 0, 1, seed=1).load_state_dict({"position": {"place": 3}})


@pytest.mark.parametrize(("length", "world_size"), [(0, 2), (1, 3), (7, 3), (8, 2), (9, 4), (5, 1)])
def test_shares_lose_nothing_follow_each_other_and_differ_by_at_most_one(length, world_size):
    shares = [rank_share(range(length), rank, world_size) for rank in range(world_size)]
    assert list(chain.from_iterable(shares)) == list(range(length))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
