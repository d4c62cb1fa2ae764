"""Success rates and the stream of prompts that follows them: formulas, statistics, ranks, resuming."""

import math
from collections import Counter
from functools import partial
from itertools import permutations

import numpy as np
import pytest
import torch
from rank_threads import in_ranks

from hybrid_grpo.config import BatchPlan, RunConfig, TrainConfig
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.loader import PromptLoader
from hybrid_grpo.features.curriculum.curriculum import Curriculum, draw_weighted, expected_gain, length_classes
from hybrid_grpo.features.curriculum.settings import CurriculumConfig
from hybrid_grpo.records.metrics.meter import Meter

CPU = torch.device("cpu")
G = 4
DIFFICULTY = CurriculumConfig(sampling="difficulty")


@pytest.fixture(autouse=True)
def young(monkeypatch):
    """Completions age faster than in a run."""
    monkeypatch.setattr("hybrid_grpo.features.curriculum.curriculum.HALF_LIFE", 20)


def prompts_of(levels: list) -> list[Prompt]:
    """Prompts of a level are equally long."""
    known = list(dict.fromkeys(levels))
    return [Prompt(10 + i, f"p{i}", [1] * (1 + known.index(level)), {"level": level}) for i, level in enumerate(levels)]


def stream(prompts, config=DIFFICULTY, batch=6, rank=0, world=1, seed=0) -> Curriculum:
    config = TrainConfig(curriculum=config, run=RunConfig(seed=seed))
    return Curriculum(prompts, config, BatchPlan(world, batch // world, G, 1, 1), rank, CPU)


def play(curriculum: Curriculum, rate_of, rng=None, more=()) -> list[Prompt]:
    """One step: a batch whose completions are right at the given rates, by chance or as near as can be; and these of
    six more prompts, as in place of groups of equal rewards."""
    batch = [*curriculum.next_batch(), *(curriculum.draw(6, more) if more else ())]
    drawn = [Prompt(p.id, p.text, p.token_ids, p.columns, epoch) for p, epoch in batch]
    for prompt in drawn:
        rate = rate_of(prompt)
        right = rng.binomial(G, rate) if rng else round(G * rate)
        curriculum.note([prompt], torch.tensor([1.0] * right + [0.0] * (G - right)), threshold=1.0)
    curriculum.update()
    return drawn


def test_the_expected_gain_is_that_of_beta_distributed_rates():
    right, wrong = np.array([0.5, 2.0, 8.0]), np.array([0.5, 5.0, 0.1])
    rates = np.random.default_rng(0).beta(right, wrong, size=(400_000, 3))
    for g in (2, 8):
        simulated = ((1 - rates) * (1 - rates**g - (1 - rates) ** g)).mean(0)
        assert expected_gain(right, wrong, g) == pytest.approx(simulated, abs=2e-3)
    # A rate that is known to be 1/4, and a group of two: 3/4 * 2 * 1/4 * 3/4.
    assert expected_gain(np.array([2.5e9]), np.array([7.5e9]), 2) == pytest.approx(9 / 32, rel=1e-6)


def test_draws_follow_the_weights_one_after_the_other():
    weight, draws = np.array([1.0, 2.0, 3.0, 0.5]), 20_000
    rng = np.random.default_rng(0)
    seen = Counter(tuple(draw_weighted(weight, 2, rng).tolist()) for _ in range(draws))
    chi_square = 0.0
    for i, j in permutations(range(4), 2):
        expected = draws * weight[i] / weight.sum() * weight[j] / (weight.sum() - weight[i])
        chi_square += (seen[i, j] - expected) ** 2 / expected
    # Twelve ordered pairs: 31.3 is exceeded with probability 0.001.
    assert sum(seen.values()) == draws and chi_square < 31.3


def test_rates_are_drawn_towards_those_of_their_class_and_age():
    curriculum = stream(prompts_of(["easy"] * 6 + ["hard"] * 6), batch=12)
    play(curriculum, lambda p: 1.0 if p.id == 10 else 0.5 if p.columns["level"] == "easy" else 0.0)
    overall = (4 + 5 * 2 + 0.5 * G) / (12 * G + G)
    easy, hard = (4 + 5 * 2 + G * overall) / (6 * G + G), G * overall / (6 * G + G)
    expected = [(G * easy + 4) / (2 * G), *[(G * easy + 2) / (2 * G)] * 5, *[G * hard / (2 * G)] * 6]
    assert curriculum.rates() == pytest.approx(expected, rel=1e-12)
    for _ in range(20):
        curriculum.update()
    aged = (7 + G * overall_after(7, 24)) / (12 + G)
    assert curriculum.rates()[0] == pytest.approx((G * aged + 2) / (G + 2), rel=1e-12)


def overall_after(right: float, tries: float) -> float:
    return (right + 0.5 * G) / (tries + G)


def test_prompts_that_were_never_tried_are_judged_by_their_like():
    """Of 3,000 prompts a tenth is tried: their levels tell which of the others teach something."""
    rates = {"solved": 0.99, "middle": 0.5, "beyond": 0.01}
    prompts, rng = prompts_of(list(rates) * 1000), np.random.default_rng(1)
    curriculum, teaching = stream(prompts, batch=30), []
    for _ in range(10):
        drawn = play(curriculum, lambda p: rates[p.columns["level"]], rng)
        teaching.append(sum(p.columns["level"] == "middle" for p in drawn) / 30)
    assert teaching[0] < 0.5 and np.mean(teaching[4:]) > 0.65
    meter = Meter()
    meter.update(curriculum.numbers())
    assert 0.08 < meter.reduce()["curriculum/tried_frac"] <= 0.1


def test_nothing_is_forgotten():
    """Solved prompts come at the floor's share, and each of them comes again."""
    prompts = prompts_of(["solved"] * 40 + ["middle"] * 40)
    curriculum, seen = stream(prompts, batch=8), Counter()
    for _ in range(600):
        seen.update(p.id for p in play(curriculum, lambda p: 1.0 if p.columns["level"] == "solved" else 0.5))
    solved = [seen[p.id] for p in prompts[:40]]
    assert min(solved) >= 2
    assert 0.04 < sum(solved) / sum(seen.values()) < 0.25


def test_a_step_draws_no_prompt_twice_until_all_are_drawn():
    curriculum = stream(prompts_of(["a", "b"] * 5), batch=4)
    drawn = curriculum.next_batch() + curriculum.next_batch()
    assert len({p.id for p, _ in drawn}) == 8
    drawn += curriculum.draw(25, range(25))
    assert len({(p.id, epoch) for p, epoch in drawn}) == 33, "two draws of a prompt have streams of their own"
    assert max(Counter(p.id for p, _ in drawn).values()) == 4
    assert curriculum.position == 33


@pytest.mark.parametrize(("bounds", "left_out"), [({"skip_above": 0.9}, 1.0), ({"skip_below": 0.1}, 0.0)])
def test_prompts_beyond_a_bound_are_left_out_until_what_is_known_has_aged(bounds, left_out, monkeypatch):
    for name, value in (("MIN_TRIES", 3), ("HALF_LIFE", 10), ("FLOOR", 1e-6)):
        monkeypatch.setattr(f"hybrid_grpo.features.curriculum.curriculum.{name}", value)
    config = CurriculumConfig(**bounds)
    prompts = prompts_of([0] * 12)
    curriculum = stream(prompts, config, batch=12)
    play(curriculum, lambda p: left_out if p.id < 16 else 0.5)
    assert curriculum.weights().tolist() == [1e-6] * 6 + [1.0] * 6
    assert min(p.id for p, _ in curriculum.draw(6, range(6))) == 16
    # Four tries are less than three after log2(4 / 3) half-lives.
    for step in range(5):
        curriculum.update()
        assert (curriculum.weights()[0] < 1) == (step < 4)


def test_completions_without_an_outcome_are_no_tries():
    curriculum = stream(prompts_of([0, 1]), batch=2)
    for prompt, epoch in curriculum.next_batch():
        outcome = [1.0, 0.0, math.nan, math.nan] if prompt.id == 10 else [math.nan] * 4
        noted = Prompt(prompt.id, "", [1], {}, epoch)
        curriculum.note([noted], torch.tensor(outcome), threshold=1.0)
    curriculum.update()
    assert curriculum.state_dict()["counts"] == [[2, 1]]


def test_the_outcome_of_a_group_that_was_carried_counts_when_it_comes():
    """In the meantime its prompt is not drawn again, and a checkpoint knows that it is open."""
    curriculum = stream(prompts_of([0, 0, 0, 0]), batch=2)
    (first, epoch), (second, of_second) = curriculum.next_batch()
    curriculum.note([Prompt(first.id, "", [1], {}, epoch)], torch.tensor([1.0, 0.0, 0.0, 0.0]), threshold=1.0)
    curriculum.update()
    assert curriculum.state_dict()["counts"] == [[4, 1]]
    other = stream(prompts_of([0, 0, 0, 0]), batch=2)
    other.load_state_dict(curriculum.state_dict())
    for each in (curriculum, other):
        drawn = each.next_batch()
        assert second.id not in [prompt.id for prompt, _ in drawn]
        for prompt, at in [*drawn, (second, of_second)]:
            each.note([Prompt(prompt.id, "", [1], {}, at)], torch.tensor([1.0, 1.0, 1.0, 0.0]), threshold=1.0)
        each.update()
        state = each.state_dict()
        assert dict(zip(state["index"], state["counts"], strict=True))[second.id - 10] == [4, 3]
        assert sum(tries for tries, _ in state["counts"]) == 16 and state["drawn"] == []


def test_by_default_the_stream_is_that_of_the_loader():
    prompts = prompts_of(list(range(7)))
    plain = PromptLoader(prompts, 6, 0, 1, 3)
    curriculum = stream(prompts, CurriculumConfig(), seed=3)
    for _ in range(5):
        assert [(p.id, p.epoch) for p in play(curriculum, lambda p: 0.5)] == [
            (p.id, epoch) for p, epoch in plain.next_batch()
        ]
    assert curriculum.draw(3, [2]) == plain.draw(3, [2])


@pytest.mark.parametrize("config", [DIFFICULTY, CurriculumConfig(skip_above=0.7), CurriculumConfig()])
def test_a_resumed_stream_goes_on_alike(config):
    prompts = prompts_of([0.0, 0.5, 1.0] * 10)
    one = stream(prompts, config)
    for _ in range(9):
        play(one, lambda p: p.columns["level"])
    other = stream(prompts, config, batch=6)
    play(other, lambda p: 1.0)
    other.load_state_dict(one.state_dict())
    for _ in range(9):
        assert play(one, lambda p: p.columns["level"]) == play(other, lambda p: p.columns["level"])
    assert np.array_equal(one.rates(), other.rates())


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_draws_its_part_of_the_same_prompts(world):
    """Each notes its own groups only."""
    prompts, share = prompts_of([0.0, 0.5, 1.0] * 10), 6 // world

    def played(rank: int, world: int, share: int):
        curriculum, more = stream(prompts, rank=rank, world=world), range(share * rank, share * (rank + 1))
        drawn = [[p.id for p in play(curriculum, lambda p: p.columns["level"], more=more)] for _ in range(8)]
        return drawn, curriculum.rates()

    expected, rates = played(0, 1, 6)
    seen = in_ranks(world, partial(played, world=world, share=share))
    for step in range(8):
        assert [id for k in (0, share) for own, _ in seen for id in own[step][k : k + share]] == expected[step]
    assert all(np.array_equal(own, rates) for _, own in seen)


def test_prompts_of_like_length_make_a_class():
    def prompts(lengths):
        return [Prompt(i, "", [1] * length, {}) for i, length in enumerate(lengths)]

    assert length_classes(prompts([1, 2, 3, 1])).tolist() == [0, 1, 2, 0]
    assert np.bincount(length_classes(prompts(range(1, 1601)))).tolist() == [100] * 16


def test_tried_prompts_come_hardest_first():
    curriculum = stream(prompts_of(["a"] * 9), batch=3)
    drawn = play(curriculum, lambda p: p.id % 2)
    lines = curriculum.tried_prompts()
    assert {line["prompt_id"] for line in lines} == {p.id for p in drawn}
    assert all(line["tries"] == G and line["right"] == G * (line["prompt_id"] % 2) for line in lines)
    assert [line["success_rate"] for line in lines] == sorted(line["success_rate"] for line in lines)
