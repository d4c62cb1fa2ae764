"""A curriculum over several sources."""

import json

import torch

from hybrid_grpo.config import BatchPlan, DataConfig, TrainConfig
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.features.curriculum.curriculum import Curriculum
from hybrid_grpo.features.curriculum.settings import CurriculumConfig

SIZES = {"a": 7, "b": 5, "c": 40}


def streams(world: int = 1) -> list[Curriculum]:
    """The loader of every rank."""
    sources = [{"path": "x", "name": n, "weight": w} for n, w in zip(SIZES, (2, 1, 3), strict=True)]
    names = [name for name, size in SIZES.items() for _ in range(size)]
    prompts = [Prompt(number, name, [1], {}, source=name) for number, name in enumerate(names)]
    follows = CurriculumConfig(sampling="difficulty", skip_above=0.9)
    config, plan = (
        TrainConfig(data=DataConfig(mixture=sources), curriculum=follows),
        BatchPlan(world, 12 // world, 2, 1, 1),
    )
    return [Curriculum(prompts, config, plan, rank, torch.device("cpu")) for rank in range(world)]


def play(ranks: list[Curriculum], count: int) -> list[list[tuple[int, int]]]:
    """Steps in which even prompts are always solved, others half of the time. Every rank notes the prompts of all."""
    found = []
    for _ in range(count):
        drawn = [rank.next_prompts(1) for rank in ranks]
        everything = [prompt for own in drawn for prompt in own]
        for rank in ranks:
            rank.note(everything, torch.tensor([right for p in everything for right in (1.0, p.id % 2 == 0)]), 1.0)
            rank.update()
        found.append([(prompt.id, prompt.epoch) for prompt in everything])
    return found


def test_the_curriculum_decides_which_prompts_of_a_source_are_drawn_and_not_how_many():
    alone = play(streams(), 60)
    ends = [7, 12, 52]
    assert all([sum(item < end for item, _ in step) for end in ends] == [4, 6, 12] for step in alone)
    assert all(len(set(step)) == 12 for step in alone)
    late = [item for step in alone[20:] for item, _ in step]
    # Of the first source four of seven are solved, and four are drawn in every step.
    for start, size, most in ((0, 7, 0.32), (7, 5, 0.1), (12, 40, 0.2)):
        own = [item % 2 == 0 for item in late if start <= item < start + size]
        assert sum(own) / len(own) < most
    ranks = streams(world=3)
    assert play(ranks, 30) == alone[:30]
    (resumed,) = streams()
    resumed.load_state_dict(json.loads(json.dumps(ranks[1].state_dict())))
    assert play([resumed], 30) == alone[30:]
