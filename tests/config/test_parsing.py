"""From command lines to configurations, and mistakes told in one line."""

import dataclasses
import subprocess
import sys
from dataclasses import replace
from typing import get_type_hints

import pytest
import yaml
from refusals import refused
from user import User

from hybrid_grpo import __version__
from hybrid_grpo.__main__ import main
from hybrid_grpo.commands.configs import GenerateConfig, PlanConfig
from hybrid_grpo.config import GrpoConfig, RewardConfig, RolloutConfig, TrainConfig, build, dump, reward_name
from hybrid_grpo.config.composition import setting_names
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse


def test_a_sound_command_line_passes_both_checks(user: User) -> None:
    assert user.train().policy.model == str(user.folder / "model")
    assert user.sft().sft.batch_size == 64


def test_later_arguments_win_over_earlier_ones(user: User) -> None:
    recipe = user.yaml("policy: {lr: 1.0e-3, warmup_steps: 5}")
    config = user.parse("--config", recipe, "--policy.lr", "1e-4")
    assert (config.policy.lr, config.policy.warmup_steps) == (1e-4, 5)
    assert user.parse("--policy.lr", "1e-4", "--config", recipe).policy.lr == 1e-3
    assert user.parse("--policy.lr", "1", "--policy.lr", "2").policy.lr == 2


def test_later_rewards_replace_earlier_ones_whole(user: User) -> None:
    """Merged entry by entry, a repetition penalty took over the keyword arguments of the exact match before it."""
    recipe = "rewards: [{function: exact_match, weight: 3.0, name: em, kwargs: {answer_column: gold}}]"
    config = user.parse("--rewards", "[{function: repetition_penalty}]", yaml=recipe)
    assert config.rewards == [RewardConfig("repetition_penalty", 1.0, None, {})]
    message = user.refused("--rewards", "[{weight: 2}]", yaml=recipe)
    assert "rewards[0].function is not set" in message


@pytest.mark.parametrize("setting", setting_names(TrainConfig))
def test_null_is_a_value_of_optional_settings_only(user: User, setting: str) -> None:
    if setting == "rewards":
        assert "rewards is empty" in user.refused(yaml="rewards: null")
        return
    if setting == "features":
        assert user.parse(yaml="features: null").features == []
        return
    section, name = setting.split(".")
    hint = get_type_hints(get_type_hints(TrainConfig)[section])[name]
    recipe = f"{section}: {{{name}: null}}"
    if type(None) in getattr(hint, "__args__", ()):
        assert getattr(getattr(user.parse(yaml=recipe), section), name) is None
    else:
        assert user.refused(yaml=recipe).startswith(f"{setting}: expected ")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("policy.verify=off", "off"), ("policy.verify=On", "on"), ("policy.verify=false", "off"),
        ("rollout.keep_cache=off", "off"), ("grpo.balance=off", "off"),
        ("grpo.balance=true", "auto"), ("log.wandb=false", "disabled"), ("log.wandb=off", "disabled"),
        ("data.chat_template=yes", "always"), ("grpo.scale_rewards=false", "none"), ("run.name=no", "no"),
        ("log.tags=[on, true]", ["on", "true"]), ("rollout.stop_strings=[no]", ["no"]), ("log.tokens=off", False),
        ("data.chat_template_kwargs={on: no, list: [yes]}", {"on": False, "list": [True]}),
    ],
)  # fmt: skip
def test_words_of_a_setting_win_over_yamls_true_and_false(user: User, setting: str, value: object) -> None:
    """`policy: {verify: off}` was refused, as False, though the help text writes it."""
    name, text = setting.split("=")
    section, key = name.split(".")
    for config in (user.parse(f"--{setting}"), user.parse(yaml=f"{section}: {{{key}: {text}}}")):
        assert getattr(getattr(config, section), key) == value


@pytest.mark.parametrize("recipe, says", refused("recipes"))
def test_wrong_types_and_unknown_names_in_a_recipe(user: User, recipe: str, says: str) -> None:
    """The setting, what it takes, and the nearest name. A key with a dot was answered with its own name."""
    assert user.refused(yaml=recipe).startswith(says)


@pytest.mark.parametrize("inside", [
    "policy.betas=[0,0]", "rollout.top_p=1", "rollout.num_generations=2", "run.seed=0", "rollout.min_p=0",
    "rollout.min_p=1", "rollout.min_completion_tokens=512", "rollout.cache_gb=0.01", "scoring.workers=0",
    "scoring.max_failed_frac=0",
])  # fmt: skip
def test_the_ends_of_ranges_are_allowed(user: User, inside: str) -> None:
    user.train(f"--{inside}")


def test_an_empty_system_prompt_is_one(user: User) -> None:
    assert user.train("--data.system_prompt=").data.system_prompt == ""


def test_token_ids_need_no_quotes(user: User) -> None:
    """YAML reads them as numbers, which a mapping from text did not take; an override then added a second entry."""
    recipe = "rollout: {logit_bias: {5: -100, 0: 1.5}}"
    assert user.train(yaml=recipe).rollout.logit_bias == {"5": -100.0, "0": 1.5}
    assert user.train("--rollout.logit_bias", "{5: -100}").rollout.logit_bias == {"5": -100.0}
    arguments = ["--config", user.yaml(recipe), "--rollout.logit_bias.5=-1"]
    parsed = parse(TrainConfig, arguments, "train")
    assert parsed.config.rollout.logit_bias == {"5": -1.0, "0": 1.5}
    assert user.parse(yaml=parsed.yaml) == parsed.config
    assert "rollout.logit_bias '-5' is not a token id" in user.refused(yaml="rollout: {logit_bias: {-5: 1.0}}")
    assert user.refused(yaml="rollout: {logit_bias: {true: 1.0}}").startswith("rollout.logit_bias")
    assert "line 1: 5 is given twice" in user.refused(yaml="rollout: {logit_bias: {5: 1.0, '5': 2.0}}")


def test_stop_strings_hold_text(user: User) -> None:
    assert user.train("--rollout.stop_strings", r'["</answer>", "\n\n"]').rollout.stop_strings == ["</answer>", "\n\n"]
    assert "rollout.stop_strings has an empty text" in user.refused("--rollout.stop_strings", '["a", ""]')


@pytest.mark.parametrize(
    "given", ["exact_match, my.py:f", "[exact_match, my.py:f]", "[{function: exact_match}, my.py:f]"]
)
def test_rewards_by_name(user: User, given: str) -> None:
    expected = [RewardConfig("exact_match"), RewardConfig("my.py:f")]
    assert user.train("--rewards", given).rewards == user.parse(yaml=f"rewards: {given}").rewards == expected


def own_reward(completions: list[str]) -> list[float]:
    return [1.0 for _ in completions]


def test_python_gives_objects() -> None:
    """A function and rows as they are; in YAML they stand by their names."""
    rows = [{"prompt": "a"}]
    given = {"rewards": [own_reward, "exact_match", {"function": own_reward, "name": "again"}], "data": {"path": rows}}
    config = build(TrainConfig, {**given, "grpo": {"objective": own_reward}})
    assert config.rewards[0] == RewardConfig(own_reward) and reward_name(config.rewards[0]) == "own_reward"
    assert config.data.path == rows and config.grpo.objective is own_reward
    settings, name = yaml.safe_load(dump(config)), f"{__name__}:own_reward"
    assert [reward["function"] for reward in settings["rewards"]] == [name, "exact_match", name]
    assert settings["grpo"]["objective"] == name and settings["data"]["path"] == "<builtins.list>"


def test_a_section_keeps_the_defaults_of_its_command() -> None:
    config = build(GenerateConfig, {"data": {"path": "x"}, "rollout": {"temperature": 0.0}})
    assert config.data.over_long == "refuse" and config.rollout.num_generations == 1


def test_settings_of_a_reward(user: User) -> None:
    (reward,) = user.train("--rewards", "[{function: f.py:f, batch_size: 4, isolation: none, timeout_s: 0.5}]").rewards
    assert (reward.batch_size, reward.isolation, reward.timeout_s) == (4, "none", 0.5)
    for size in ("auto", "group"):
        assert user.train("--rewards", f"[{{function: a, batch_size: {size}}}]").rewards[0].batch_size == size


def test_nothing_changes_a_configuration_after_parsing(user: User) -> None:
    config = user.train()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.policy.lr = 1.0  # type: ignore[misc]


def test_a_launcher_that_adds_its_rank_is_told_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--local_rank=0", "train"], ["train", "--policy.lr=1", "--local-rank=3"]):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "--no_local_rank" in error and error.count("\n") == 1


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"hybrid-grpo {__version__}\n"


def test_a_part_of_a_split_is_one(user: User) -> None:
    assert user.train("--data.split", "train[:90%]").data.split == "train[:90%]"


@pytest.mark.process
def test_a_mistake_does_not_cost_an_import_of_torch(user: User) -> None:
    code = (
        "import sys; from hybrid_grpo.__main__ import main;"
        " status = main(sys.argv[1:]);"
        " print(status, sorted({'torch', 'transformers', 'deepspeed', 'datasets'} & sys.modules.keys()))"
    )
    arguments = ["train", *user.sound, "--rollout.num_generations=1", "--rewards=[{function: exact_match}]"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "2 []"
    assert done.stderr.startswith("hybrid-grpo: error: rollout.num_generations 1 ")


@pytest.mark.parametrize("option, value", [
    ("--log.tags=one", ["one"]), ("--log.tags=one, two", ["one", "two"]), ("--log.tags=[]", []),
    ("--log.tags none", []), ("--log.tags one two", ["one", "two"]), ("--rollout.stop_ids 5 7", [5, 7]),
    ("--log.tokens --log.tags a", True), ("--lora.target_modules=all-linear", "all-linear"),
])  # fmt: skip
def test_lists_need_no_brackets_and_switches_no_value(option, value):
    words = option.split() if "=" not in option else [option]
    section, name = words[0][2:].partition("=")[0].split(".")
    config = parse(TrainConfig, ["--lora.rank=4", *words, "--rewards", "exact_match", "f.py:f"], "train").config
    assert [reward.function for reward in config.rewards] == ["exact_match", "f.py:f"]
    assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize("written, name", [
    *[("H100", "h100"), ("NVIDIA H100 80GB HBM3", "h100"), ("4090", "rtx4090"), ("GeForce RTX 4090", "rtx4090")],
    *[("NVIDIA GeForce RTX 5090", "rtx5090"), ("A10G", "a10g"), ("RTX 3090", "rtx3090"), ("L40S", "l40s")],
    *[("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("A100 PCIe 40GB", "a100-40gb"), ("a100-40gb", "a100-40gb")],
])  # fmt: skip
def test_gpus_are_known_in_any_spelling(written, name):
    assert parse(PlanConfig, [f"--plan.gpu={written}"], "plan").config.plan.gpu == name


def test_bounds_are_idle_only_where_the_ratio_is_one():
    config = TrainConfig(grpo=GrpoConfig(epsilon_high=0.28, dual_clip=3.0))
    assert config.idle_bounds(1) == ["grpo.epsilon_high", "grpo.dual_clip"]
    assert config.idle_bounds(2) == [] and TrainConfig().idle_bounds(1) == []
    assert replace(config, rollout=RolloutConfig(logprobs="sampling", top_p=0.9)).idle_bounds(1), "they are recomputed"
    sampler = replace(config.grpo, old_logp="sampler")
    assert not replace(config, grpo=sampler, rollout=RolloutConfig(logprobs="sampling", top_p=0.9)).idle_bounds(1)
    assert not replace(config, grpo=sampler).idle_bounds(1), "what the user has asked for counts from the start"


def test_settings_that_earlier_versions_had_are_ignored_in_the_files_of_their_runs_and_nowhere_else(tmp_path):
    recipe = tmp_path / "config.yaml"
    recipe.write_text("streaming: {enabled: false, block: 10000}\nrun: {steps: 3}\n")
    assert parse(TrainConfig, [f"--config={recipe}"], "train").config.run.steps == 3
    recipe.write_text("streaming: {enabled: true, block: 10000}\n")
    with pytest.raises(UserError, match=r"streaming\.enabled"):
        parse(TrainConfig, [f"--config={recipe}"], "train")
