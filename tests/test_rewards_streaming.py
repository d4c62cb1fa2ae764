"""Scoring group by group while others are sampled: the same scores, the same errors, less waiting."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from hybrid_grpo.data.batch import Completion, Prompt, Scores
from hybrid_grpo.errors import UserError
from hybrid_grpo.rewards.loading import Reward
from hybrid_grpo.rewards.scoring import Rewards
from hybrid_grpo.rewards.streaming import Stream

G = 3


def rewards(*functions: Callable[..., Any]) -> Rewards:
    return Rewards([Reward(f.__name__, 1.0, f, {}, frozenset(), None) for f in functions])


def prompt(number: int, **columns: Any) -> Prompt:
    return Prompt(id=100 + number, text=f"p{number}", token_ids=[1], columns=columns)


def completion(text: str) -> Completion:
    return Completion(list(map(ord, text)), [0.0] * len(text), "stop", text)


def rollout(prompts: int) -> list[list[Completion]]:
    return [[completion(f"{i}{'abc'[k]}" * (i + k + 1)) for k in range(G)] for i in range(prompts)]


def streamed(scorer: Rewards, prompts: list[Prompt], groups: list[list[Completion]], seed: int = 0) -> Scores:
    """Scores of the groups, their completions finished in random order."""
    finished = [(i, k) for i in range(len(groups)) for k in range(G)]
    random.Random(seed).shuffle(finished)
    with Stream(scorer, prompts, G) as stream:
        for i, k in finished:
            stream.add(i, k, groups[i][k])
        return stream.scores()


def length(completions, **_):
    return [float(len(text)) for text in completions]


def applies_to_b(completions, level, **_):
    return [float(n) if "b" in text else None for text, n in zip(completions, level, strict=True)]


async def given(prompts, completion_ids, **columns):
    await asyncio.sleep(0.001)
    return [sum(ids) + len(columns) + int(p[1:]) / 8 for ids, p in zip(completion_ids, prompts, strict=True)]


@pytest.mark.parametrize("seed", range(3))
def test_streamed_scores_are_those_of_all_rows_at_once(seed):
    prompts = [prompt(i, level=i, **({"rare": 1} if i else {})) for i in range(5)]
    groups = rollout(5)
    scorer = rewards(length, applies_to_b, given)
    ours = streamed(scorer, prompts, groups, seed)
    theirs = scorer.score([p for p in prompts for _ in range(G)], [c for group in groups for c in group])
    assert ours.reward_B.tolist() == theirs.reward_B.tolist() and len(set(ours.reward_B.tolist())) == 5 * G
    for name in scorer.names:
        assert ours.by_function[name].nan_to_num(-1).tolist() == theirs.by_function[name].nan_to_num(-1).tolist()


def test_a_call_gets_one_whole_group_as_soon_as_that_is_finished():
    seen = []

    def watches(prompts, completions, level, **_):
        seen.append((prompts, completions, level))
        return [0.0] * len(prompts)

    prompts, groups = [prompt(i, level=i) for i in range(2)], rollout(2)
    with Stream(rewards(watches), prompts, G) as stream:
        for i, k in [(1, 2), (0, 0), (1, 0), (1, 1), (0, 2), (0, 1)]:
            stream.add(i, k, groups[i][k])
        stream.scores()
    assert seen == [([f"p{i}"] * G, [c.text for c in groups[i]], [i] * G) for i in (1, 0)]


def test_slow_rewards_hide_behind_sampling():
    def slow(completions, **_):
        time.sleep(0.05)
        return [1.0] * len(completions)

    prompts, groups = [prompt(i) for i in range(10)], rollout(10)
    with Stream(rewards(slow), prompts, G) as stream:
        for i, group in enumerate(groups):
            time.sleep(0.06)  # stands for decoding
            for k, done in enumerate(group):
                stream.add(i, k, done)
        start = time.perf_counter()
        scores = stream.scores()
        wait = time.perf_counter() - start
    assert scores.reward_B.tolist() == [1.0] * 10 * G
    assert stream.seconds >= 0.5, "every group was slow"
    assert wait < 0.4 * stream.seconds, "about the last group's tenth is left to wait for"


def test_a_rank_without_prompts_waits_for_nothing():
    def breaks(completions, answer, **_):
        return [max(completions)]

    with Stream(rewards(breaks), [], G) as stream:
        scores = stream.scores()
    assert scores.reward_B.shape == scores.by_function["breaks"].shape == (0,) and stream.seconds == 0.0


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_error_names_the_row_of_the_rollout_when_scores_are_asked_for(kind):
    def inverse(completions, **_):
        return [1 / (text != "2bb") for text in completions]

    async def inverse_async(completions, **_):
        return inverse(completions)

    function = inverse if kind == "plain" else inverse_async
    scorer = rewards(length, function)
    groups = [[completion(f"{i}{'ab'[k > 0]}" + "b" * (k == 1)) for k in range(G)] for i in range(4)]
    with pytest.raises(UserError) as streamed_error:
        streamed(scorer, [prompt(i) for i in range(4)], groups)
    with pytest.raises(UserError) as error:
        scorer.score([prompt(i) for i in range(4) for _ in range(G)], [c for group in groups for c in group])
    assert str(streamed_error.value) == str(error.value)
    assert "; the first row at fault is row 7 (prompt 102)" in str(error.value) and "\n" not in str(error.value)
    assert isinstance(streamed_error.value.__cause__, ZeroDivisionError)
    assert streamed(rewards(length), [prompt(0)], rollout(1)).reward_B.tolist() == [2.0, 4.0, 6.0]


def test_of_several_faults_the_first_row_is_told_whichever_came_first():
    def odd(completions, **_):
        return [1.0 if text[0] == "0" else text for text in completions]

    for seed in range(3):
        with pytest.raises(UserError, match=r"odd returned '1a1a' for row 3 \(prompt 101\): return a finite number"):
            streamed(rewards(odd), [prompt(i) for i in range(4)], rollout(4), seed)


def test_columns_are_checked_before_anything_is_sampled():
    scorer = rewards(length)
    with pytest.raises(UserError, match="data: column completions has the name"):
        Stream(scorer, [prompt(0, completions=1)], G)


def test_an_error_in_sampling_drops_the_calls_to_come():
    calls = []

    def slow(completions, **_):
        calls.append(completions)
        time.sleep(0.1)
        return [0.0] * len(completions)

    scorer, groups = rewards(slow), rollout(6)
    with pytest.raises(MemoryError), Stream(scorer, [prompt(i) for i in range(6)], G) as stream:
        for i, group in enumerate(groups):
            for k, done in enumerate(group):
                stream.add(i, k, done)
        raise MemoryError
    # What goes on behind the first call, which may have begun, is the next rollout's.
    assert streamed(scorer, [prompt(0)], rollout(1)).reward_B.tolist() == [0.0] * G
    assert len(calls) <= 2


def test_completions_that_are_lost_or_double_are_noticed():
    with Stream(rewards(length), [prompt(0)], G) as stream:
        stream.add(0, 1, completion("a"))
        with pytest.raises(AssertionError, match="completion 1 of prompt 0 came twice"):
            stream.add(0, 1, completion("a"))
        with pytest.raises(AssertionError, match="missing"):
            stream.scores()
