"""Commands that read the recipe of a training run: what they use of it, what they leave aside, what they refuse."""

from typing import Any

import pytest
import yaml
from user import User

from hybrid_grpo.commands.configs import ChatConfig, EvaluateConfig, GenerateConfig, ScoreConfig
from hybrid_grpo.config import SftConfig, TrainConfig, build, dump
from hybrid_grpo.config.building import refuse_unused
from hybrid_grpo.config.composition import about, is_unused, setting_names
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.config.types import fields_of

READERS = [ChatConfig, EvaluateConfig, GenerateConfig, ScoreConfig]


@pytest.mark.parametrize("cls", READERS)
def test_the_stored_settings_of_a_run_can_be_read_and_given_are_those_that_the_command_has(
    user: User, cls: Any
) -> None:
    run = build(TrainConfig, {"run": {"seed": 7, "steps": 3}, "data": {"system_prompt": "Sort."}, "rewards": ["f"]})
    parsed = parse(cls, ["--config", user.yaml(dump(run))], cls.command)
    for name in setting_names(cls):
        section, _, key = name.partition(".")
        if name in setting_names(TrainConfig):
            of_run, of_command = getattr(run, section), getattr(parsed.config, section)
            assert (getattr(of_command, key) == getattr(of_run, key)) if key else of_command == of_run
    # What is printed is what is used.
    again = parse(cls, ["--config", user.yaml(parsed.yaml)], cls.command)
    assert again.config == parsed.config and "steps: 3" not in parsed.yaml


@pytest.mark.parametrize("cls", READERS)
def test_what_a_command_does_not_use_is_refused_where_it_is_asked_for(cls: Any) -> None:
    others = [name for training in (TrainConfig, SftConfig) for name in setting_names(training) if is_unused(cls, name)]
    assert len(others) > 100 and not set(others) & set(setting_names(cls))
    for name in others:
        expected = f"{name} is a setting of training, which {cls.command} does not use: remove it"
        with pytest.raises(UserError) as refused:
            parse(cls, [f"--{name}=1"], cls.command)
        assert str(refused.value) == expected
        section, _, key = name.partition(".")
        with pytest.raises(UserError) as refused:
            refuse_unused(cls, {section: {key: 1}})
        assert str(refused.value) in (expected, expected.replace(name, section))


def test_a_whole_section_may_be_given_without_what_is_not_used() -> None:
    rollout = parse(GenerateConfig, ["--rollout={temperature: 0.5}"], "generate").config.rollout
    assert (rollout.temperature, rollout.num_generations) == (0.5, 1)
    with pytest.raises(UserError, match=r"^rollout.prompts_per_step is a setting of training, which generate does not"):
        parse(GenerateConfig, ["--rollout={temperature: 0.5, prompts_per_step: 3}"], "generate")


def test_rewards_of_a_task_are_those_that_score_computes(user: User) -> None:
    config = parse(ScoreConfig, ["--config", user.yaml("data: {task: gsm8k}")], "score").config
    assert [reward.function for reward in config.rewards] == ["numeric_answer"]


def test_a_command_has_the_settings_that_it_needs() -> None:
    assert len(setting_names(ChatConfig)) < 60 and len(setting_names(ScoreConfig)) < 30
    assert not {"grpo", "checkpoint", "engine", "lora", "guard"} & {name for cls in READERS for name in fields_of(cls)}
    names = {name for cls in (TrainConfig, SftConfig) for name in setting_names(cls)}
    marked = {command for name in names for command in (about(name).unused_by or "").split()}
    assert marked <= {"plan", *(cls.command for cls in READERS)}


def test_rounded_weights_have_other_defaults_in_the_loss_and_in_an_alarm() -> None:
    def of(**sections: Any) -> tuple[str, float | None]:
        config = build(TrainConfig, {"rollout": {"weights": "int8"}, **sections})
        assert build(TrainConfig, yaml.safe_load(dump(config))) == config
        return config.grpo.sampler_correction, config.alarms.parity and config.alarms.parity.above

    assert of() == of(grpo={"beta": 0.1}, alarms={"kl": None}) == ("truncate", 0.15)
    assert of(alarms={"parity": {"action": "stop"}}) == ("truncate", 0.15)
    assert of(grpo={"preset": "icepop"}, alarms={"parity": None}) == ("band", None)
    assert of(grpo={"sampler_correction": "none"}) == of(grpo={"old_logp": "sampler"}) == ("none", 0.15)
