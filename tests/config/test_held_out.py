"""Held-out sets: what is said of them by themselves, by their task, by the run; and what is refused."""

import pytest
import yaml

from hybrid_grpo.config import TrainConfig, build, dump
from hybrid_grpo.config.held_out import HeldOut, Rows, held_out_sets
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.data.sources import Source, held_out_source


def sets(*arguments: str) -> dict[str, HeldOut]:
    config = parse(TrainConfig, list(arguments), "train").config
    assert build(TrainConfig, yaml.safe_load(dump(config))) == config
    return {held_out.name: held_out for held_out in held_out_sets(config)}


PLAIN = ("--data.path=train.jsonl", "--rewards=exact_match")


def test_the_settings_of_before_are_one_set() -> None:
    assert sets(*PLAIN) == {}
    found = sets(*PLAIN, "--data.eval_path=test.jsonl", "--data.eval_limit=9", "--eval.name=mine", "--eval.every=3")
    (mine,) = found.values()
    assert (mine.name, mine.every, mine.outcome, mine.rewards) == ("mine", 3, "exact_match", None)
    assert (mine.rollout.num_generations, mine.rollout.temperature, mine.rollout.max_completion_tokens) == (1, 0.0, 512)
    assert held_out_source(mine) == Source("test.jsonl", None, None, 9, "data.eval_path", "data.eval_split")


def test_a_set_is_as_the_run_but_for_what_it_says() -> None:
    found = sets(
        *("--data.task=gsm8k", "--eval.every=5", "--eval.temperature=0.7", "--eval.num_generations=2"),
        *("--eval.sets.math", "{task: math, limit: 200, every: 50, threshold: 0.5}"),
        *("--eval.sets.hard.path=hard.jsonl", "--eval.sets.hard.rewards=exact_match,numeric_answer"),
        *("--eval.sets.hard.max_completion_tokens=4096", "--eval.sets.hard.system_prompt=Think."),
        *("--eval.sets.greedy.temperature=0", "--eval.sets.greedy.num_generations=1", "--eval.sets.greedy.limit=7"),
        *("--eval.sets.seen.split=train[:100]",),
    )
    assert list(found) == ["heldout", "math", "hard", "greedy", "seen"]
    math, hard, greedy, seen = (found[name] for name in ("math", "hard", "greedy", "seen"))
    assert math.rows == Rows("HuggingFaceH4/MATH-500", "test", None, 200)
    assert (math.every, math.threshold, math.outcome, math.data.task) == (50, 0.5, "math_answer", "math")
    assert [reward.function for reward in math.rewards or []] == ["math_answer"]
    assert hard.rows == Rows("hard.jsonl", None, None, None) and hard.outcome == "exact_match"
    assert (hard.data.task, hard.data.system_prompt, hard.data.chat_template) == ("gsm8k", "Think.", "always")
    assert (hard.rollout.max_completion_tokens, hard.rollout.temperature, hard.every) == (4096, 0.7, 5)
    assert greedy.rows is None and greedy.rollout.temperature == 0 and greedy.rewards is None
    assert held_out_source(greedy).limit == 7 and held_out_source(greedy).split == "test"
    assert seen.rows == Rows("openai/gsm8k", "train[:100]", "main", None) and seen.outcome == "numeric_answer"
    assert held_out_source(seen).split_setting == "eval.sets.seen.split"


@pytest.mark.parametrize("count, k", [(1, []), (2, [2]), (8, [2, 4, 8]), (12, [2, 4, 8, 12])])
def test_the_k_are_powers_of_two_and_the_number_of_completions(count: int, k: list[int]) -> None:
    arguments = ("--data.eval_split=test", f"--eval.num_generations={count}", "--eval.temperature=1")
    found = sets(*PLAIN, *arguments)["heldout"]
    assert found.sample_counts == k
    assert [name for name in found.better_higher if "maj" in name] == [f"eval/heldout/maj@{n}" for n in k if n > 2]
