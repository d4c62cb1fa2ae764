"""YAML files of settings, and what YAML would let pass."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused
from user import User

from hybrid_grpo.config.recipes import read_recipe, read_value


def test_a_later_file_overrides_setting_by_setting(user: User) -> None:
    first, second = user.folder / "first.yaml", user.folder / "second.yaml"
    first.write_text("policy: {lr: 1.0e-3, weight_decay: 0.1}")
    second.write_text("policy: {lr: 2.0e-3}")
    config = user.parse("--config", str(first), "--config", str(second))
    assert (config.policy.lr, config.policy.weight_decay) == (2e-3, 0.1)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("1E-6", 1e-6), ("'1e-6'", 1e-6), ("1.e-6", 1e-6), ("3", 3.0), (".5", 0.5)]
)
def test_numbers_that_yaml_takes_for_text(user: User, text: str, value: float) -> None:
    lr = user.parse(yaml=f"policy:\n  lr: {text}\n").policy.lr
    assert lr == value and type(lr) is float
    assert user.parse("--policy.lr", text.strip("'")).policy.lr == value


@pytest.mark.parametrize("recipe, complaint", refused("yaml"))
def test_yaml_that_would_let_a_mistake_pass(user: User, recipe: str, complaint: str) -> None:
    message = user.refused(yaml=recipe)
    assert message.startswith("--config ") and "recipe.yaml" in message and complaint in message


def test_a_merged_mapping_gives_no_key_twice(user: User) -> None:
    """`<<` writes the merged keys into the mapping that is read, here before its own keys are looked at."""
    recipe = "rewards:\n- {function: a, kwargs: &own {<<: {x: 1}, x: 2}}\nscoring: {<<: *own}\n"
    assert read_recipe(Path(user.yaml(recipe)))["scoring"] == {"x": 2}


@pytest.mark.parametrize("name", ["1", "true", "2026-01-01", "1e3", "v1.2_b-c", ".hidden", "é"])
def test_run_names_that_yaml_would_read_otherwise(user: User, name: str) -> None:
    assert user.train(f"--run.name={name}").run.name == name


def test_an_entry_of_a_mapping_goes_over_a_recipe_s(user: User) -> None:
    recipe = "engine: {deepspeed: {aio: {x: 1, y: 2}, timers: 3}}"
    changed = user.train("--engine.deepspeed.aio.x=4", yaml=recipe).engine.deepspeed
    assert changed == {"aio": {"x": 4, "y": 2}, "timers": 3}
    assert user.train("--engine.deepspeed={pipeline: 1}", yaml=recipe).engine.deepspeed == {"pipeline": 1}
    assert user.train("--engine", "{zero_stage: 2}", yaml=recipe).engine.deepspeed["timers"] == 3


def stacked(line: Callable[[str, int], str], levels: int) -> str:
    """Lines of which each is made from the name of the one before."""
    return "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {line(f'*a{i - 1}', i)}\n" for i in range(1, levels))


BOMBS = {
    "aliases": stacked(lambda below, _: f"[{','.join([below] * 10)}]", 12),
    "merges": stacked(lambda below, _: f"{{<<: [{','.join([below] * 10)}]}}", 12),
    "merges one by one": stacked(lambda below, level: f"{{<<: {below}, x{level}: 1}}", 20_000),
    "a long text many times": f"a: &a {'x' * 50_000}\nb: [{'*a,' * 50_000}]", "levels": "[" * 100_000,
    "levels by aliases": stacked(lambda below, _: f"[{below}]", 400), "levels by blocks": "- " * 100_000 + "1",
    "branches of itself": "a: &a [*a, *a]", "keys": "{? " * 100_000, "letters": "a: " + "x" * 2**21,
    "directives": "".join(f"%TAG !{number}! a\n" for number in range(50_000)) + "---\na: 1\n",
    "a number": "a: " + "9" * 1_000_000, "a number to base 60": "a: 1" + ":59" * 300_000,
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_fill_memory_is_refused_at_once(tmp_path: Path, name: str) -> None:
    """A merge of merges hung the command line, and 100,000 levels ended a process that reads YAML in C."""
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMBS[name])
    start = time.process_time()
    with pytest.raises(ValueError, match=r"bomb\.yaml cannot be read: .*(more than|beyond|deeply|digits|depth)"):
        read_recipe(path)
    assert read_value(BOMBS[name]) == BOMBS[name], "an option is the text itself then"
    assert time.process_time() - start < 4


def test_a_few_aliases_and_merges_are_settings(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("policy: &small {lr: 1e-6, betas: [0.9, 0.95]}\nlarge: {<<: *small, lr: 2e-6}\nsft: *small\n")
    small = {"lr": 1e-6, "betas": [0.9, 0.95]}
    assert read_recipe(path) == {"policy": small, "large": {**small, "lr": 2e-6}, "sft": small}
