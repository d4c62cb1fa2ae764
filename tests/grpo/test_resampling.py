"""Dynamic sampling: what is drawn anew, which candidates are kept, and when it ends."""

import pytest
import torch

from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores
from hybrid_grpo.data.loader import PromptLoader
from hybrid_grpo.grpo.resampling import candidates, resample
from hybrid_grpo.records.metrics.meter import Meter


def rollout_of(prompts: list[Prompt], good: set[int]) -> tuple[Rollout, Scores]:
    """Groups of two, whose rewards differ for the good prompts only."""
    rows = [Completion([p.id, k], [0.0, 0.0], "stop") for p in prompts for k in range(2)]
    reward_B = torch.tensor([float(p.id in good and k) for p in prompts for k in range(2)], dtype=torch.float64)
    return Rollout(prompts, rows, 2), Scores(reward_B, {"f": reward_B}, {"f": torch.zeros(len(reward_B))})


class Step:
    """A step of `groups` groups on one rank, over a data set whose prompts are good or not."""

    def __init__(self, groups: int, good: set[int], max_rounds: int) -> None:
        prompts = [Prompt(i, "p", [1], {}) for i in range(100)]
        self.loader = PromptLoader(prompts, groups, 0, 1, 0, shuffle=False)
        self.meter = Meter()
        self.rounds: list[list[int]] = []
        rollout, scores = rollout_of([prompt for prompt, _ in self.loader.next_batch()], good)

        def sample(prompts: list[Prompt]) -> tuple[Rollout, Scores]:
            self.rounds.append([prompt.id for prompt in prompts])
            return rollout_of(prompts, good)

        self.rollout, self.scores, numbers = resample(
            rollout, scores, list(range(groups)),
            draw=lambda count, wanted: [prompt for prompt, _ in self.loader.draw(count, wanted)], sample=sample,
            slots=groups, sum_over_ranks=lambda counts: counts, max_rounds=max_rounds,
        )  # fmt: skip
        self.meter.update(numbers)
        self.kept = [prompt.id for prompt in self.rollout.prompts]


def test_open_slots_are_taken_by_the_first_candidate_that_teaches_something():
    step = Step(4, good={0, 2, 5, 6, 7}, max_rounds=5)
    # Two of four teach something: two candidates each for the slots of 1 and 3, dealt in turns.
    assert step.rounds == [[4, 5, 6, 7]]
    assert step.kept == [0, 6, 2, 5], "7 teaches something too, and is one too many"
    assert step.rollout.completions[2].token_ids == [6, 0]
    assert step.scores.reward_B.tolist() == step.scores.by_function["f"].tolist() == [0.0, 1.0] * 4
    values = step.meter.reduce()
    assert values["group/informative_frac"] == 5 / 8
    assert values["group/resampled"] == 4 and values["group/resample_rounds"] == 1
    assert step.loader.state_dict()["offset"] == 8


def test_nothing_is_sampled_where_every_group_teaches_something():
    step = Step(4, good=set(range(4)), max_rounds=5)
    assert step.rounds == [] and step.kept == [0, 1, 2, 3]
    assert step.meter.reduce()["group/resample_rounds"] == 0


def test_what_is_missing_at_the_end_stays():
    step = Step(4, good={9}, max_rounds=2)
    # None has taught anything yet: as many candidates as a step has groups; then one in twelve, so as many again.
    assert step.rounds == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert step.kept == [0, 9, 2, 3]


def test_no_prompt_is_drawn_twice():
    step = Step(6, good={13, 40}, max_rounds=5)
    drawn = [id for ids in step.rounds for id in ids]
    assert drawn == list(range(6, 6 + len(drawn)))


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_candidates_belong_to_slots_whoever_has_them(world):
    share = 6 // world
    seen = {}
    for rank in range(world):
        mine = list(range(rank * share, (rank + 1) * share))
        for number, group in zip(*candidates([1, 3, 4], mine, 2), strict=True):
            seen[number] = mine[group]
    assert seen == {0: 1, 1: 3, 2: 4, 3: 1, 4: 3, 5: 4}
