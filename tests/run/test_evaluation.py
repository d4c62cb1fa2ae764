"""What an evaluation says of completions, and of which random streams it draws them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from hybrid_grpo.commands.eval import Measured, _facts, _table
from hybrid_grpo.config import RewardConfig, TrainConfig
from hybrid_grpo.config.building import build
from hybrid_grpo.config.held_out import HeldOut, held_out_sets
from hybrid_grpo.data.batch import Completion, Prompt, Scores
from hybrid_grpo.generation import Sampling
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.scorer import Rewards
from hybrid_grpo.run.evaluation import EvalResults, EvalSet

NAN = math.nan


def held_out(**settings) -> HeldOut:
    data = {"path": "train.jsonl", "eval_path": "heldout.jsonl"}
    (found,) = held_out_sets(
        build(TrainConfig, {"data": data, "rewards": [{"function": "exact_match", "name": "f"}], "eval": settings})
    )
    return found


def results(settings: HeldOut, values: list[float], texts: list[str], extra=None, statuses=None) -> EvalResults:
    value_B = torch.tensor(values, dtype=torch.float64)
    status_B = torch.tensor(statuses or [0] * len(values), dtype=torch.int8)
    reward_B = value_B.nan_to_num(0.0).masked_fill(status_B >= 2, NAN)
    completions = [Completion([1], [0.0], "stop", text) for text in texts]
    scores = Scores(reward_B, {"f": value_B}, {"f": status_B}, extra=extra or {})
    return EvalResults(settings, [Prompt(0, "", [1], {})] * len(values), completions, scores)


def test_a_failure_counts_as_wrong():
    meter = Meter()
    found = results(held_out(threshold=0.5), [1.0, 0.25, NAN, NAN], ["a"] * 4, statuses=[0, 0, 2, 1])
    meter.update(found.numbers())
    values = meter.reduce()
    assert values["eval/heldout/accuracy"] == 0.25 and values["eval/heldout/failed_frac"] == 0.25
    assert values["eval/heldout/reward_mean"] == pytest.approx(1.25 / 3)
    assert values["eval/heldout/stderr"] == pytest.approx(0.25)
    assert not [name for name in values if "@" in name]


SAMPLED = {"num_generations": 4, "temperature": 0.5}


def test_several_completions_give_pass_and_majority_at_k():
    """Of two prompts: half of the completions are right, and agree; one is right, and the wrong ones agree."""
    meter = Meter()
    texts, values = ["a", "a ", "b", "c", "x", "y", "y", "y"], [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    meter.update(results(held_out(**SAMPLED), values, texts).numbers())
    read = {name.removeprefix("eval/heldout/"): value for name, value in meter.reduce().items()}
    assert read["accuracy"] == pytest.approx((1 / 2 + 1 / 4) / 2)
    # Of two completions no majority is measured: it is the accuracy.
    assert read["pass@2"] == pytest.approx((5 / 6 + 1 / 2) / 2) and "maj@2" not in read
    assert read["pass@4"] == 1.0 and read["maj@4"] == 0.5
    # Completions of a prompt are no independent draws: it is the error of 1/2 and 1/4, not of eight completions.
    assert read["stderr"] == pytest.approx(0.125)


def test_the_reward_is_a_mean_over_prompts_like_its_interval():
    """It was a mean over completions, so that prompts with failures counted less than the interval took them for."""
    meter = Meter()
    values, statuses = [1.0, NAN, NAN, NAN, 0.0, 0.5, 0.0, 0.5, *[NAN] * 4], [0, 2, 2, 2, 0, 0, 0, 0, 2, 2, 2, 2]
    found = results(held_out(**SAMPLED), values, ["a"] * 12, statuses=statuses)
    meter.update(found.numbers())
    assert meter.reduce()["eval/heldout/reward_mean"] == pytest.approx((1.0 + 0.25) / 2)


def test_eval_shows_what_it_has_where_a_reward_failed_on_every_completion():
    """The command ended with a KeyError."""
    meter = Meter()
    found = results(held_out(), [NAN, NAN], ["a", "b"], statuses=[2, 2])
    meter.update(found.numbers())
    by_prompt = {f"eval/heldout/{n}": dict(enumerate(v.tolist())) for n, v in found.by_prompt().items()}
    measured = Measured("none", meter.reduce(), by_prompt)
    facts = _facts(measured)
    assert facts["intervals"]["eval/heldout/reward_mean"] is None and "eval/heldout/reward_mean" not in facts
    assert facts["eval/heldout/failed_frac"] == 1.0
    rows = list(zip(*(column.cells for column in _table(measured, facts["intervals"]).columns), strict=True))
    assert ("heldout/reward_mean", "", "", "", "0") in rows


@pytest.mark.parametrize("name", ["answer", "pred"])
def test_answers_are_those_that_the_outcome_function_has_read(name):
    texts, values = ["is 2", "so 2.0", "3", "2"], [1.0, 1.0, 0.0, 1.0]
    for stored, majority in (([2, 2, 3, None], 1.0), ([4, 5, 6, 6], 0.5)):
        found = results(held_out(**SAMPLED), values, texts, extra={f"f/{name}": stored, "g/answer": [0] * 4})
        assert found.by_prompt()["maj@4"].tolist() == [majority]


@pytest.mark.parametrize("function, texts, answers", [
    ("numeric_answer", ["#### 1,000", "so #### 1000.0", "none"], ["1000", "1000", None]),
    ("multiple_choice", ["The answer is (B).", "Answer: b", "neither"], ["B", None, None]),
    pytest.param("math_answer", [r"\boxed{2}", "#### 2", "2"], ["2", "2", None], marks=pytest.mark.process),
])  # fmt: skip
def test_built_in_outcomes_store_what_they_have_read(function, texts, answers):
    gold = "B" if function == "multiple_choice" else "2"
    prompts = [Prompt(0, "", [1], {"answer": gold})] * len(texts)
    rewards = Rewards(load_rewards([RewardConfig(function)]))
    scores = rewards.score(prompts, [Completion([1], [0.0], "stop", text) for text in texts], len(texts))
    assert scores.extra == {f"{function}/answer": answers}


def eval_set(settings: HeldOut, ids: list[int], seed: int = 0) -> EvalSet:
    return EvalSet(settings, [Prompt(i, "", [i], {}) for i in ids], Rewards([]), (4,), seed)


def requests(held_out: EvalSet):
    return held_out.requests(held_out.own_prompts())


def test_random_streams_are_those_of_seed_set_prompt_and_sample():
    keys = [request.keys for request in requests(eval_set(held_out(**SAMPLED), [0, 1, 2]))]
    assert len({key for group in keys for key in group}) == 12
    some = requests(eval_set(held_out(**SAMPLED), [2, 0]))
    assert [request.keys for request in some] == [keys[2], keys[0]]
    more = requests(eval_set(held_out(**{**SAMPLED, "num_generations": 5}), [1]))
    assert more[0].keys[:4] == keys[1]
    for other in (eval_set(held_out(**SAMPLED, name="other"), [0]), eval_set(held_out(**SAMPLED), [0], seed=1)):
        assert not set(requests(other)[0].keys) & set(keys[0])


def test_a_temperature_draws_from_the_softmax_and_filters_of_training_do_not_count():
    settings = held_out(temperature=0.5, top_p=0.9, max_completion_tokens=7)
    settings = replace(settings, rollout=replace(settings.rollout, top_k=3, repetition_penalty=2.0))
    assert eval_set(settings, [0]).sampling == Sampling(7, 0.5, top_p=0.9, stop_ids=(4,))
    greedy = replace(settings, rollout=replace(settings.rollout, temperature=0.0))
    assert eval_set(greedy, [0]).sampling == Sampling(7, 0.0, stop_ids=(4,))


def test_a_rank_without_prompts_adds_nothing():
    found = results(held_out(**SAMPLED), [], [])
    assert all(len(value_P) == 0 for value_P in found.by_prompt().values())
    meter = Meter()
    meter.update(found.numbers())
    assert meter.reduce() == {} and np.isnan(found.scores.reward_B.mean())
