"""The calling convention, the sum, and what becomes of functions that misbehave."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from foreign_rewards import boxed_equals, longer_is_better
from reward_helpers import inline, rows, statuses

from hybrid_grpo.config import RewardConfig, ScoringConfig
from hybrid_grpo.config.errors import RunStopped, UserError
from hybrid_grpo.rewards import rules
from hybrid_grpo.rewards.functions import CONTEXT
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.rules import _text_or_number
from hybrid_grpo.rewards.scorer import Rewards


def rewards(*functions: Callable[..., Any], weights: list[float] | None = None, **kwargs: Any) -> Rewards:
    """Given all rows at once."""
    return Rewards(
        [inline(function, weight=weights[i] if weights else 1.0, kwargs=kwargs) for i, function in enumerate(functions)]
    )


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_function_is_given() -> None:
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [0, 0]

    def named(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    prompts, completions = rows("a", "bc", answer=["a", "b"], level=[1, None])
    assert rewards(everything, named).score(prompts, completions).by_function["named"].tolist() == [1.0, 0.0]
    assert {name: value for name, value in seen.items() if name not in CONTEXT} == {
        "prompts": ["p0", "p1"],
        "completions": ["a", "bc"],
        "completion_ids": [[97], [98, 99]],
        "answer": ["a", "b"],
        "level": [1, None],
    }
    rewards(everything, setting=5).score(*rows("a", "b", chat=True))
    assert seen["prompts"] == [[{"role": "user", "content": "p0"}], [{"role": "user", "content": "p1"}]]
    assert seen["completions"] == [[{"role": "assistant", "content": text}] for text in "ab"]
    assert seen["setting"] == 5


def test_columns_that_some_rows_lack_are_not_given() -> None:
    def names(**kwargs):
        return [float("level" in kwargs)] * 2

    prompts, completions = rows("a", "b", level=[1, 2])
    assert rewards(names).score(prompts, completions).reward_B.tolist() == [1.0, 1.0]
    del prompts[1].columns["level"]
    assert rewards(names).score(prompts, completions).reward_B.tolist() == [0.0, 0.0]


def test_weighted_sum_leaves_out_what_does_not_apply() -> None:
    def first(completions):
        return [1.0, None, 3.0]

    def second(completions):
        return [0.5, 0.25, None]

    scores = rewards(first, second, weights=[2.0, -1.0]).score(*rows("a", "b", "c"))
    assert scores.reward_B.tolist() == [1.5, -0.25, 6.0]
    assert scores.reward_B.dtype == torch.float64
    assert [scores.by_function[n].isnan().tolist() for n in ("first", "second")] == [
        [False, True, False],
        [False, False, True],
    ]
    unweighted = rewards(first, second, weights=[0.0, 1.0]).score(*rows("a", "b", "c"))
    assert unweighted.reward_B.tolist() == [0.5, 0.25, 0.0] and unweighted.by_function["first"][2] == 3.0


def test_values_may_be_any_kind_of_number() -> None:
    def kinds(completions):
        return [True, 2, np.float32(0.5), np.int64(3), np.bool_(False), torch.tensor(1.5), None]

    def array(completions):
        return np.arange(7)

    def tensor(completions):
        return torch.arange(7) / 2

    scores = rewards(kinds, array, tensor).score(*rows(*"abcdefg"))
    assert scores.by_function["kinds"].nan_to_num(9).tolist() == [1.0, 2.0, 0.5, 3.0, 0.0, 1.5, 9.0]
    assert scores.by_function["array"].tolist() == list(range(7))
    assert scores.by_function["tensor"].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]


def inverse(completions, **kwargs):
    return [1 / float(c) for c in completions]


async def inverse_async(completions, **kwargs):
    return inverse(completions)


@pytest.mark.parametrize("function", [inverse, inverse_async])
def test_a_function_that_raises_leaves_the_row_at_fault_without_a_reward(capfd, function) -> None:
    scores = rewards(longer_is_better, function).score(*rows("1", "2", "0", "x", "4"))
    name = function.__name__
    assert scores.reward_B.nan_to_num(-1).tolist() == [2.0, 1.5, -1.0, -1.0, 1.25]
    assert statuses(scores, name) == ["scored", "scored", "failed", "failed", "scored"]
    assert scores.by_function["longer_is_better"].tolist() == [1.0] * 5
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"rewards: {name} raised ZeroDivisionError: (float )?division by zero \(test_scorer.py:\d+\). The"
        " completion of row 102 .from 0. has no reward and counts as failed",
        lines[0],
    )
    assert lines[1] == "Traceback (most recent call last):" and "ZeroDivisionError: " in "".join(lines[-2:])


def test_a_function_of_texts_that_gets_chats_is_told_so_once(capfd) -> None:
    """All completions failed, and the message was of a list without `strip`."""

    def strips(completions):
        return [float(completion.strip() == "1") for completion in completions]

    def divides(completions):
        return [1 / 0]

    def last_message(completions):
        return [completion[-1]["content"] == "1" for completion in completions]

    scorer = rewards(strips, divides)
    for _ in range(2):
        assert statuses(scorer.score(*rows("1", "2", chat=True)), "strips") == ["failed"] * 2
    errors = capfd.readouterr().err
    assert errors.count('the text of one is completion[-1]["content"]') == 1
    rewards(last_message).score(*rows("1"))
    assert "TypeError" in (errors := capfd.readouterr().err) and "chats" not in errors


def test_answers_that_are_found_in_no_completion_are_reported_once(capfd) -> None:
    scorer = Rewards(load_rewards([RewardConfig("numeric_answer")]))
    for texts in (["so it is 4."], ["#### 3"], ["five"], ["six"], ["seven"], ["eight"]):
        scorer.score(*rows(*texts, answer=["4"]))
    assert not capfd.readouterr().err, "it has found one"
    scorer = Rewards(load_rewards([RewardConfig("numeric_answer")]))
    for _ in range(4):
        scorer.score(*rows("so it is 4.", "5", answer=["4", None]))
    (line,) = capfd.readouterr().err.splitlines()
    assert "numeric_answer found no answer in any of 6 completions, such as 'so it is 4.': let the prompts" in line
    assert "ask for a number after #### or in \\boxed{}, or set kwargs last_number to true" in line


def test_a_wrong_number_of_values() -> None:
    def forgets(completions):
        return [1.0 for c in completions if c != "b"]

    def one(completions):
        return [1.0]

    scores = rewards(forgets, one).score(*rows("a", "b", "c"))
    assert statuses(scores, "forgets") == ["scored", "failed", "scored"]
    assert statuses(scores, "one") == ["scored"] * 3, "row by row it is right"


@pytest.mark.parametrize("result, kind", [(1.0, "a float"), (None, "None"), (1, "an int"), ({}, "a dict")])
def test_what_is_not_a_list_is_a_failure(capfd, result, kind: str) -> None:
    def odd(completions):
        return result

    assert statuses(rewards(odd).score(*rows("a", "b")), "odd") == ["failed"] * 2
    assert f"odd returned {kind}, expected a list of 1." in capfd.readouterr().err


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1.0", [1.0], 1j, 10**400, torch.ones(2), object()])
def test_what_is_not_a_finite_number_is_a_failure_of_its_row(capfd, value) -> None:
    def odd(completions):
        return [1.0, value, None]

    scores = rewards(odd).score(*rows("a", "b", "c"))
    assert scores.reward_B.nan_to_num(-1).tolist() == [1.0, -1.0, 0.0]
    assert statuses(scores, "odd") == ["scored", "failed", "not_applicable"]
    message = capfd.readouterr().err
    assert message.startswith("rewards: odd returned ") and ": return a finite number" in message


def test_one_failure_takes_the_whole_reward() -> None:
    def fails(completions):
        return [1.0, math.nan]

    def fine(completions):
        return [5.0, 5.0]

    for weights in ([1.0, 1.0], [0.0, 1.0]):
        scores = rewards(fails, fine, weights=weights).score(*rows("a", "b"))
        assert scores.reward_B.isnan().tolist() == [False, True]
        assert scores.by_function["fine"].tolist() == [5.0, 5.0]


def test_too_many_failures_end_the_run() -> None:
    def f(completions):
        return [math.nan if text == "bad" else 1.0 for text in completions]

    def refuse(max_failed_frac: float, failures: int) -> None:
        scorer = Rewards([inline(longer_is_better), inline(f)], ScoringConfig(max_failed_frac=max_failed_frac))
        texts = ["bad"] * failures + ["good"] * (100 - failures)
        scorer.refuse_failures(scorer.score(*rows(*texts)), torch.device("cpu"))

    refuse(0.25, 25)
    with pytest.raises(RunStopped) as caught:
        refuse(0.25, 26)
    assert str(caught.value) == (
        "rewards: f failed on 26 of 100 completions, more than scoring.max_failed_frac 0.25: the first failures are"
        " printed above; fix the function and continue with --run.resume auto"
    )
    refuse(1.0, 100)
    with pytest.raises(RunStopped):
        refuse(0.0, 1)


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids"])
def test_a_column_named_as_an_input_is_refused(name: str) -> None:
    message = refusal(lambda: rewards(longer_is_better).score(*rows("a", **{name: ["x"]})))
    assert message.startswith(f"rewards: column {name} of the data has ") and message.endswith("rename it")


def test_a_column_named_as_a_fixed_argument_is_refused() -> None:
    message = refusal(lambda: rewards(longer_is_better, level=1).score(*rows("a", level=[2])))
    assert "longer_is_better has level both in kwargs and as a column" in message


def test_the_first_row_that_cannot_be_judged_is_refused_without_asking_all_again(monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(rules, "_text_or_number", lambda gold: asked.append(gold) or _text_or_number(gold))
    prompts, _ = rows(*"a" * 9999, answer=["b", *[{}] * 2, *"b" * 9996])
    functions = Rewards(load_rewards([RewardConfig("exact_match")]))
    assert "exact_match cannot judge row 101 (from 0) of data.path x" in refusal(
        lambda: functions.check_prompts(prompts, "data.path x")
    )
    assert 0 < len(asked) < 2000
    functions.check_prompts(prompts[3:])
    assert len(asked) > 9996


def test_missing_columns_are_refused_before_anything_is_called() -> None:
    scorer = rewards(boxed_equals)
    assert "boxed_equals needs ground_truth, which is neither a column" in refusal(lambda: scorer.check_columns([]))
    assert "did you mean ground_truths?" in refusal(lambda: scorer.check_columns(["ground_truths", "task"]))
    assert "needs ground_truth" in refusal(lambda: scorer.score(*rows("a")))
    scorer.check_columns(["ground_truth"])
