"""Scoring completions while others are sampled: the same scores, less waiting."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from paths import SUPPORT
from reward_helpers import completion, in_time, inline, isolated, statuses

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.data.batch import Completion, Prompt, Scores
from hybrid_grpo.rewards.scorer import Rewards

G = 3
FILE = SUPPORT.joinpath("acting_rewards.py")


def rewards(*functions: Callable[..., Any], batch_size: Any = "group") -> Rewards:
    return Rewards([inline(function, batch_size=batch_size) for function in functions])


def prompt(number: int, **columns: Any) -> Prompt:
    return Prompt(id=100 + number, text=f"p{number}", token_ids=[1], columns=columns)


def rollout(prompts: int) -> list[list[Completion]]:
    return [[completion(f"{i}{'abc'[k]}" * (i + k + 1)) for k in range(G)] for i in range(prompts)]


def streamed(scorer: Rewards, prompts: list[Prompt], groups: list[list[Completion]], seed: int = 0) -> Scores:
    """Scores of the groups, their completions finished in random order."""
    finished = [(i, k) for i in range(len(groups)) for k in range(G)]
    random.Random(seed).shuffle(finished)
    with scorer.stream(prompts, G) as stream:
        for i, k in finished:
            stream.add(i, k, groups[i][k])
        return stream.scores()


def length(completions, **_):
    return [float(len(text)) for text in completions]


def applies_to_b(completions, level, **_):
    return [float(n) if "b" in text else None for text, n in zip(completions, level, strict=True)]


def given(prompts, completion_ids, **columns):
    known = [name for name in columns if name in ("level", "rare")]
    return [sum(ids) + len(known) + int(p[1:]) / 8 for ids, p in zip(completion_ids, prompts, strict=True)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch_size", [1, 4, "group"])
def test_streamed_scores_are_those_of_all_rows_at_once(seed, batch_size):
    """However many completions a call has, and whichever came first."""
    prompts = [prompt(i, level=i, **({"rare": 1} if i else {})) for i in range(5)]
    groups = rollout(5)
    ours = streamed(rewards(length, applies_to_b, given, batch_size=batch_size), prompts, groups, seed)
    scorer = rewards(length, applies_to_b, given, batch_size=5 * G)
    theirs = scorer.score([p for p in prompts for _ in range(G)], [c for group in groups for c in group])
    assert ours.reward_B.tolist() == theirs.reward_B.tolist() and len(set(ours.reward_B.tolist())) == 5 * G
    for name in scorer.names:
        assert ours.by_function[name].nan_to_num(-1).tolist() == theirs.by_function[name].nan_to_num(-1).tolist()
        assert ours.status[name].tolist() == theirs.status[name].tolist()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.process
def test_processes_say_the_same(seed):
    prompts, groups = [prompt(i) for i in range(6)], [[completion(f"{G * i + k}") for k in range(G)] for i in range(6)]
    scorer = isolated(RewardConfig(f"{FILE}:act"), RewardConfig(f"{FILE}:act_async", weight=100.0))
    assert streamed(scorer, prompts, groups, seed).reward_B.tolist() == [101.0 * row for row in range(6 * G)]


@pytest.mark.parametrize(("batch_size", "calls"), [
    ("group", [[3, 4, 5], [0, 1, 2]]),
    (1, [[5], [0], [3], [4], [2], [1]]),
    (4, [[0, 3, 4, 5], [1, 2]]),
])  # fmt: skip
def test_a_call_gets_its_rows_as_soon_as_they_are_there(batch_size, calls):
    seen = []

    def watches(prompts, completions, level):
        seen.append((prompts, completions, level))
        return [0.0] * len(prompts)

    prompts, groups = [prompt(i, level=i) for i in range(2)], rollout(2)
    with rewards(watches, batch_size=batch_size).stream(prompts, G) as stream:
        for count, (i, k) in enumerate([(1, 2), (0, 0), (1, 0), (1, 1), (0, 2), (0, 1)], 1):
            stream.add(i, k, groups[i][k])
            due = sum(len(call) for call in calls) if count == 6 and batch_size != 4 else None
            assert due is None or sum(len(call[0]) for call in seen) == due
        stream.scores()
    texts = [c.text for group in groups for c in group]
    assert seen == [
        ([f"p{row // G}" for row in call], [texts[row] for row in call], [row // G for row in call]) for call in calls
    ]


@pytest.mark.process
def test_slow_rewards_hide_behind_sampling(tmp_path):
    """Decoding lasts until the group before is scored; the seconds count when nobody waits, too."""
    prompts = [prompt(i) for i in range(10)]
    scorer = isolated(RewardConfig(f"{FILE}:leaves_files", batch_size=1, kwargs={"folder": str(tmp_path)}))
    with scorer.stream(prompts, G) as stream:
        for row in range(10 * G):
            stream.add(row // G, row % G, completion(f"{row}"))
            if row % G == G - 1:
                assert in_time(lambda: len(list(tmp_path.iterdir())) == row + 1), row  # noqa: B023
        scores = stream.scores()
    assert scores.reward_B.tolist() == [float(row) for row in range(10 * G)]
    assert stream.seconds >= 10 * G * 0.05 / 2, "of two workers"


def test_a_rank_without_prompts_waits_for_nothing():
    def breaks(completions, answer):
        return [max(completions)]

    with rewards(breaks).stream([], G) as stream:
        scores = stream.scores()
    assert scores.reward_B.shape == scores.by_function["breaks"].shape == scores.status["breaks"].shape == (0,)
    assert stream.seconds == 0.0


def test_failures_are_those_of_their_rows():
    def inverse(completions):
        return [1 / (text != "2bb") for text in completions]

    groups = [[completion(f"{i}{'ab'[k > 0]}" + "b" * (k == 1)) for k in range(G)] for i in range(4)]
    for batch_size in (1, 4, "group"):
        scores = streamed(rewards(length, inverse, batch_size=batch_size), [prompt(i) for i in range(4)], groups)
        assert statuses(scores, "inverse") == ["scored"] * 7 + ["failed"] + ["scored"] * 4
        assert scores.reward_B.isnan().nonzero().tolist() == [[7]]


def test_completions_that_are_lost_or_double_are_noticed():
    with rewards(length).stream([prompt(0)], G) as stream:
        stream.add(0, 1, completion("a"))
        with pytest.raises(AssertionError, match="completion 1 of prompt 0 came twice"):
            stream.add(0, 1, completion("a"))
        with pytest.raises(AssertionError, match="missing"):
            stream.scores()


def test_a_run_that_stops_waits_for_no_function():
    """Otherwise slow rewards would use up the time in which it saves itself."""
    answers = iter([False, True])
    reward = inline(length, batch_size="group")
    with Rewards([replace(reward, caller=lambda call: Future())]).stream([prompt(0)], G) as stream:
        for k, done in enumerate(rollout(1)[0]):
            stream.add(0, k, done)
        scores = stream.scores(gives_up=lambda: next(answers))
    assert all(why == "was not awaited because the run is stopping" for why in scores.failures[reward.name])
