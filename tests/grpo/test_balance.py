"""Which rank trains on which group, and how groups get there and back."""

from functools import partial

import pytest
import torch
from rank_threads import in_ranks

from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.distributed.ranks import exchange_objects
from hybrid_grpo.grpo.balance import Assignment, assign
from hybrid_grpo.grpo.minibatches import minibatch_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("idle", [0.0, 0.3])
@pytest.mark.parametrize("ranks, groups, num_minibatches, most", [
    (8, 16, 1, 1.01), (8, 4, 1, 1.1), (64, 8, 1, 1.05), (8, 16, 4, 1.1), (2, 8, 2, 1.1),
])  # fmt: skip
def test_ranks_train_on_about_the_same_number_of_tokens(ranks, groups, num_minibatches, most, idle):
    """Lengths are log-normal, as those of reasoning models. In each minibatch, and separately for groups with and
    without a gradient, no rank has many more tokens than the mean, unless a single group has them."""
    generator = torch.Generator().manual_seed(0)
    base_RP = torch.randn(ranks, groups, generator=generator, dtype=torch.float64) * 0.7 + 6
    cost_RP = (base_RP[..., None] + 0.5 * torch.randn(ranks, groups, 8, generator=generator)).exp().sum(2)
    idle_RP = torch.rand(ranks, groups, generator=generator) < idle
    target_rank_RP, balance = assign(cost_RP, idle_RP, num_minibatches)
    _, before = assign(cost_RP, idle_RP, num_minibatches, may_move=False)
    assert before < 0.85 and balance > before + 0.08
    parts = [value_RP.view(ranks, num_minibatches, -1) for value_RP in (torch.tensor(target_rank_RP), cost_RP, idle_RP)]
    for minibatch in range(num_minibatches):
        taker_N, cost_N, idle_N = (of[:, minibatch].flatten() for of in parts)
        assert set(taker_N.tolist()) == set(range(ranks)), "a rank without any completion could not take part"
        for of_kind_N in (idle_N, ~idle_N) if idle else (~idle_N,):
            own_N = cost_N * of_kind_N
            load_R = torch.zeros(ranks, dtype=cost_N.dtype).index_add(0, taker_N, own_N)
            few = 1 + own_N.max() / load_R.mean() if of_kind_N.sum() < 4 * ranks else most
            assert load_R.max() <= max(own_N.max(), few * load_R.mean())


def test_every_rank_gets_a_group_even_if_few_have_a_gradient():
    cost_RP = torch.tensor([[9.0, 8.0], [1.0, 1.0], [1.0, 1.0]]).double()
    for idle_RP in (torch.zeros(3, 2).bool(), torch.tensor([[False, False], [True, True], [True, True]])):
        target_rank_RP, _ = assign(cost_RP, idle_RP, 1)
        assert {taker for takers in target_rank_RP for taker in takers} == {0, 1, 2}


def test_nothing_moves_where_little_is_gained():
    target_rank_RP, balance = assign(torch.tensor([[5.0, 5.1], [5.0, 5.0]]).double(), torch.zeros(2, 2).bool(), 1)
    assert target_rank_RP == [[0, 0], [1, 1]] and balance == pytest.approx(10.05 / 10.1)
    cost_RP, idle_RP = torch.tensor([[6.0, 3.0], [3.0, 3.0]]).double(), torch.tensor([[False, True]] * 2)
    _, balance = assign(cost_RP, idle_RP, 1)
    assert balance == pytest.approx((4.5 + 1) / (6 + 1)), "a group without a gradient costs a third"


def test_groups_travel_whole_in_their_minibatch_and_results_return():
    """Three ranks, of which one has scores of steps and another failures of a function."""
    target_rank_RP, size = [[1, 0, 2, 0], [1, 2, 2, 1], [0, 1, 0, 2]], 2

    def program(rank: int):
        ids = [(10 * rank + group, 2 + rank + group) for group in range(4)]
        rows = [Completion([number] * length, [-1.0] * length, "stop") for number, length in ids for _ in range(size)]
        rollout = Rollout([Prompt(number, "", [number], {"answer": number}) for number, _ in ids], rows, size)
        reward_B = torch.tensor([float(number) for number, _ in ids for _ in range(size)]).double()
        steps = [[(1, reward)] for reward in reward_B.tolist()] if rank == 1 else None
        failures = {"f": ["late"] * 8} if rank == 2 else {}
        scores = Scores(
            reward_B, {"f": reward_B}, {"f": torch.zeros(8)}, steps, reward_B if steps else None, {}, failures
        )
        assignment = Assignment(target_rank_RP, 2, rank, partial(exchange_objects, device=CPU))
        trained, given = assignment.scatter(rollout, scores)
        assert (
            [c.token_ids[0] for c in trained.completions] == given.reward_B.tolist() == given.by_function["f"].tolist()
        )
        assert all(p.columns == {"answer": p.id} and p.token_ids == [p.id] for p in trained.prompts)
        assert [given.failures["f"][row] for row, prompt in enumerate(trained.row_prompts) if prompt.id >= 20] == (
            ["late"] * sum(prompt.id >= 20 for prompt in trained.row_prompts)
        )
        steps_of = [given.steps[row] for row, prompt in enumerate(trained.row_prompts) if prompt.id // 10 == 1]
        assert all(len(row) == 1 for row in steps_of)
        home_BT = assignment.gather_tokens(trained.mask_BT * given.reward_B[:, None].float(), trained, rollout)
        assert torch.equal(home_BT, rollout.mask_BT * reward_B[:, None].float())
        return [p.id for p in trained.prompts], [list(rows) for rows in minibatch_rows(trained, 2)]

    assert in_ranks(3, program) == [
        ([1, 20, 3, 22], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([0, 10, 21, 13], [[0, 1, 2, 3, 4, 5], [6, 7]]),
        ([11, 2, 12, 23], [[0, 1], [2, 3, 4, 5, 6, 7]]),
    ]
