"""Every generator of reasoning-gym as a task: its problems, its options, and what counts as an answer."""

from itertools import islice

import pytest
from reasoning_gym.factory import DATASETS

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.tasks import load_task
from hybrid_grpo.rewards.tasks.gym import gym_answer, stated

WITHOUT_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Their problems have many right answers, of which none is given."""


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - {"composite"}))
def test_a_generator_finds_its_own_answer_right_and_others_wrong(name):
    task = load_task(f"gym/{name}")
    made = next(task.made(False))
    row = {**made, **task.row(made)}
    assert row["prompt"] == made["question"] and row["metadata"] is None
    right = [] if name in WITHOUT_ANSWERS else [f"So it is\n<answer>{made['answer']}</answer>"]
    texts = [*right, "", "<answer>13 eggs</answer>", "[[", "\\boxed{x}"]
    scores = gym_answer(texts, [name] * len(texts), [row["problem"]] * len(texts))
    assert scores[: len(right)] == [1.0] * len(right) and min(scores) >= 0
    assert name == "game_of_life_halting" or max(scores[len(right) :]) < 1, "any text is a guess there"


@pytest.mark.parametrize("name, says", [
    ("gym/chain_sums", "reasoning-gym has no generator chain_sums: did you mean chain_sum"),
    ("gym/chain_sum,terms=3", "chain_sum has no option terms"),
    ("gym/chain_sum,min_terms=5,max_terms=2", "chain_sum refuses these options: max_terms must be"),
])  # fmt: skip
def test_what_there_is_not_is_named(name, says):
    with pytest.raises(UserError, match=says):
        load_task(name)


def test_options_may_be_lists():
    rows = islice(load_task("gym/basic_arithmetic,operators=[+,-]").made(True), 20)
    assert not any(set("*/") & set(row["metadata"]["expression"]) for row in rows)


@pytest.mark.parametrize(
    ("text", "right", "answer"),
    [
        ("5 + 7 = 12.", "12", "12"), ("12 apples and 1,200 pears", "7", "1200"), ("x is -3", "4", "-3"), ("", "4", ""),
        ("<answer>a</answer> no, <answer> b c </answer> 12", "12", "b c"), (r"\boxed{7} or 8", "7", "7"),
        ("first\n last line ", "word", "last line"), ("ab", None, "ab"), ("1/2 of 3/4", "1/2", "3/4"),
    ],
)  # fmt: skip
def test_one_rule_says_what_is_the_answer(text, right, answer):
    assert stated(text, right) == answer
    assert gym_answer([text], [None], [None]) == [None], "rows of other sources"
