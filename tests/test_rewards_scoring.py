"""The calling convention, the sum, and what is said of functions that misbehave."""

import asyncio
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_grpo.config import RewardConfig
from hybrid_grpo.data.batch import Completion, Prompt, Scores
from hybrid_grpo.errors import UserError
from hybrid_grpo.rewards import loading
from hybrid_grpo.rewards.loading import load_rewards
from hybrid_grpo.rewards.scoring import Rewards


@pytest.fixture
def rewards(monkeypatch) -> Callable[..., Rewards]:
    """`rewards(f, g, weights=[...])`, loaded as a configuration would."""

    def build(*functions: Callable[..., Any], weights: list[float] | None = None, **kwargs: Any) -> Rewards:
        monkeypatch.setattr(loading, "_find", lambda spec, setting: functions[int(spec)])
        configs = [
            RewardConfig(str(i), weight=weights[i] if weights else 1.0, name=f.__name__, kwargs=kwargs)
            for i, f in enumerate(functions)
        ]
        return Rewards(load_rewards(configs))

    return build


def rows(*texts: str, chat: bool = False, **columns: list) -> tuple[list[Prompt], list[Completion]]:
    prompts = [
        Prompt(
            id=100 + i,
            text=[{"role": "user", "content": f"p{i}"}] if chat else f"p{i}",
            token_ids=[1],
            columns={name: values[i] for name, values in columns.items()},
        )
        for i in range(len(texts))
    ]
    return prompts, [Completion(list(map(ord, text)), [0.0] * len(text), "stop", text) for text in texts]


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Functions in the shapes that TRL's documentation shows: they are not to be changed to run here.


def longer_is_better(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def thinks_then_answers(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) else 0.0 for text in texts]


def boxed_equals(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if m and m.group(1) == gold else 0.0 for m, gold in zip(found, ground_truth, strict=True)]


def only_maths(prompts, completions, task, **kwargs):
    return [float("4" in c) if t == "math" else None for _, c, t in zip(prompts, completions, task, strict=True)]


async def slow_length(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]


def test_trl_functions_run_unchanged(rewards) -> None:
    prompts, completions = rows(r"\boxed{4}", r"\boxed{5}x", ground_truth=["4", "4"], task=["math", "code"])
    scores = rewards(longer_is_better, boxed_equals, only_maths, slow_length).score(prompts, completions)
    assert scores.by_function["longer_is_better"].tolist() == [9.0, 10.0]
    assert scores.by_function["boxed_equals"].tolist() == [1.0, 0.0]
    assert scores.by_function["only_maths"].nan_to_num(-7).tolist() == [1.0, -7.0]
    assert scores.by_function["slow_length"].tolist() == [9.0, 10.0]
    assert scores.reward_B.tolist() == [20.0, 20.0]


def test_trl_functions_on_chats_run_unchanged(rewards) -> None:
    good = "<think>a</think><answer>b</answer>"
    scores = rewards(thinks_then_answers).score(*rows(good, "b", chat=True))
    assert scores.reward_B.tolist() == [1.0, 0.0]


def test_what_a_function_is_given(rewards) -> None:
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [0, 0]

    def named(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    prompts, completions = rows("a", "bc", answer=["a", "b"], level=[1, None])
    assert rewards(everything, named).score(prompts, completions).by_function["named"].tolist() == [1.0, 0.0]
    assert seen == {
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


def test_columns_that_some_rows_lack_are_not_given(rewards) -> None:
    def names(**kwargs):
        return [float("level" in kwargs)] * 2

    prompts, completions = rows("a", "b", level=[1, 2])
    assert rewards(names).score(prompts, completions).reward_B.tolist() == [1.0, 1.0]
    del prompts[1].columns["level"]
    assert rewards(names).score(prompts, completions).reward_B.tolist() == [0.0, 0.0]


def test_a_function_may_change_what_it_is_given(rewards) -> None:
    """Popping a token, or appending the completion to the prompt's messages, must not reach the rollout."""

    def spoils(prompts, completions, completion_ids, answer):
        for prompt, ids in zip(prompts, completion_ids, strict=True):
            prompt.append("more")
            prompt[0]["content"] = "spoilt"
            ids.clear()
        answer.clear()
        completions.pop()
        return [1.0, 2.0]

    def counts(answer, completions):
        return [float(len(answer)), float(len(completions))]

    prompts, completions = rows("a", "b", chat=True, answer=[1, 2])
    assert rewards(spoils, counts).score(prompts, completions).reward_B.tolist() == [3.0, 4.0]
    assert prompts[0].text == [{"role": "user", "content": "p0"}] and completions[0].token_ids == [97]


def test_weighted_sum_leaves_out_what_does_not_apply(rewards) -> None:
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


def test_a_row_to_which_nothing_applies_gets_0_and_one_warning(rewards) -> None:
    def some(completions):
        return [None if c == "b" else 1.0 for c in completions]

    scorer = rewards(some)
    with pytest.warns(UserWarning, match=r"no function applies to row 1 \(1 of 2 rows\)"):
        assert scorer.score(*rows("a", "b")).reward_B.tolist() == [1.0, 0.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer.score(*rows("b"))


def test_values_may_be_any_kind_of_number(rewards) -> None:
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


def test_no_rows_call_no_function(rewards) -> None:
    def breaks(completions, answer):
        return [max(completions)]

    scores = rewards(breaks).score([], [])
    assert isinstance(scores, Scores) and scores.reward_B.shape == scores.by_function["breaks"].shape == (0,)


def test_async_functions_run_together_and_always_in_one_loop(rewards) -> None:
    loops, order = [], []

    async def first(completions):
        loops.append(asyncio.get_running_loop())
        order.append("first starts")
        await asyncio.sleep(0.01)
        order.append("first ends")
        return [1.0]

    async def second(completions):
        order.append("second starts")
        return [2.0]

    def runs_a_loop_of_its_own(completions):
        return asyncio.run(second(completions))

    scorer = rewards(first, second)
    assert scorer.score(*rows("a")).reward_B.tolist() == [3.0]
    assert order == ["first starts", "second starts", "first ends"]
    scorer.score(*rows("a"))
    assert loops[0] is loops[1]
    assert rewards(first, runs_a_loop_of_its_own).score(*rows("a")).reward_B.tolist() == [3.0]


def inverse(completions, **kwargs):
    return [1 / float(c) for c in completions]


async def inverse_async(completions, **kwargs):
    return inverse(completions)


@pytest.mark.parametrize("function", [inverse, inverse_async])
def test_a_function_that_raises_is_named_with_the_row(rewards, function) -> None:
    with pytest.raises(UserError) as caught:
        rewards(longer_is_better, function).score(*rows("1", "2", "0", "x"))
    message = str(caught.value)
    # The batch stops at the same row, so the error is told once.
    assert re.fullmatch(
        rf"rewards: {function.__name__} raised ZeroDivisionError: float division by zero"
        r" \(test_rewards_scoring.py:\d+\); the first row at fault is row 2 \(prompt 102\)",
        message.replace("ZeroDivisionError: division", "ZeroDivisionError: float division"),
    )
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_function_that_raises_on_no_row_alone(rewards) -> None:
    def all_alike(completions):
        assert len(set(completions)) == 1, "they differ"
        return [1.0] * len(completions)

    message = refusal(lambda: rewards(all_alike).score(*rows("a", "b")))
    assert "all_alike raised AssertionError: they differ" in message and "one row at a time it does not" in message


def test_wrong_length_names_the_row(rewards) -> None:
    def forgets(completions):
        return [1.0 for c in completions if c != "b"]

    def one(completions):
        return [1.0]

    assert refusal(lambda: rewards(forgets).score(*rows("a", "b", "c"))) == (
        "rewards: forgets returned 2 values, expected 3; the first row at fault is row 1 (prompt 101),"
        " which alone returned 0 values, expected 1"
    )
    message = refusal(lambda: rewards(one).score(*rows("a", "b")))
    assert "one returned 1 values, expected 2" in message and "must return one value per row" in message


@pytest.mark.parametrize("result, kind", [(1.0, "float"), (None, "NoneType"), ("ab", "str"), ({}, "dict")])
def test_what_is_not_a_list_is_refused(rewards, result, kind: str) -> None:
    def odd(completions):
        return result

    assert f"odd returned a {kind}, expected a list of 2; the first row" in refusal(
        lambda: rewards(odd).score(*rows("a", "b"))
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1.0", [1.0], 1j, 10**400, torch.ones(2), object()])
def test_what_is_not_a_finite_number_is_refused(rewards, value) -> None:
    def odd(completions):
        return [1.0, value, math.nan]

    message = refusal(lambda: rewards(odd).score(*rows("a", "b", "c")))
    assert message.startswith("rewards: odd returned ") and "for row 1 (prompt 101): return a finite number" in message


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids"])
def test_a_column_named_as_an_input_is_refused(rewards, name: str) -> None:
    message = refusal(lambda: rewards(longer_is_better).score(*rows("a", **{name: ["x"]})))
    assert message.startswith(f"data: column {name} ") and message.endswith("rename it")


def test_a_column_named_as_a_fixed_argument_is_refused(rewards) -> None:
    message = refusal(lambda: rewards(longer_is_better, level=1).score(*rows("a", level=[2])))
    assert "longer_is_better has level both in kwargs and as a column" in message


def test_missing_columns_are_refused_before_anything_is_called(rewards) -> None:
    scorer = rewards(boxed_equals)
    assert "boxed_equals needs ground_truth, which is neither a column" in refusal(lambda: scorer.check_columns([]))
    assert "did you mean ground_truths?" in refusal(lambda: scorer.check_columns(["ground_truths", "task"]))
    assert "needs ground_truth" in refusal(lambda: scorer.score(*rows("a")))
    scorer.check_columns(["ground_truth"])


def test_names_keep_the_order_of_the_configuration(rewards) -> None:
    scorer = rewards(only_maths, boxed_equals)
    assert scorer.names == ["only_maths", "boxed_equals"]
    prompts, completions = rows("4", ground_truth=["4"], task=["math"])
    assert list(scorer.score(prompts, completions).by_function) == scorer.names
