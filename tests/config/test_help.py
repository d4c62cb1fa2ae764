"""What --help and --print_config show."""

import ast
import re
from typing import Any, get_type_hints

import pytest
from paths import ROOT
from user import User

from hybrid_grpo.commands.configs import (
    ChatConfig,
    EvaluateConfig,
    GenerateConfig,
    PlanConfig,
    PublishConfig,
    WatchConfig,
)
from hybrid_grpo.config import SftConfig, TrainConfig
from hybrid_grpo.config.commands import RecipeReader
from hybrid_grpo.config.composition import settings_of
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import Parsed, parse
from hybrid_grpo.config.presets import presets


def help_of(cls: Any, capsys: pytest.CaptureFixture[str], *section: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(cls, ["--help", *section], "train")
    assert caught.value.code == 0
    return capsys.readouterr().out


CLASSES = [
    *(TrainConfig, SftConfig, EvaluateConfig),
    *(GenerateConfig, ChatConfig, PublishConfig, WatchConfig),
]


@pytest.mark.parametrize("cls", CLASSES)
def test_help_of_sections_has_every_setting_with_its_documentation(
    cls: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    overview, documentation = help_of(cls, capsys), documented_fields()
    for section, hint in get_type_hints(cls).items():
        assert f"\n  {section} " in overview
        # Without spaces, as lines are broken at hyphens too.
        lines = help_of(cls, capsys, section)
        text = "".join(lines.split())
        if section == "features":
            continue  # it has no settings
        name = "RewardConfig" if section == "rewards" else hint.__name__
        used = settings_of(cls, section)
        for setting, doc in documentation[name].items():
            if section != "rewards" and setting not in used:
                assert f"--{section}.{setting}\n" not in lines and issubclass(cls, RecipeReader)
                continue
            assert (setting if section == "rewards" else f"--{section}.{setting}") in text
            doc = doc.replace("{presets}", ",".join(presets()))
            assert doc and "".join(doc.split()) in text, f"{section}.{setting}"


def test_a_section_with_settings_of_a_command_s_own_explains_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    documentation, text = documented_fields(), "".join(help_of(EvaluateConfig, capsys, "eval").split())
    documented = documentation["EvalConfig"] | documentation["EvalOptionsConfig"]
    for name in settings_of(EvaluateConfig, "eval"):
        assert "".join(documented[name].split()) in text
    overview = help_of(EvaluateConfig, capsys)
    assert overview.index("--eval.against") < overview.index("settings to know first")


def usual_of(cls: Any, capsys: pytest.CaptureFixture[str]) -> list[str]:
    overview = help_of(cls, capsys).partition("settings to know first:\n")[2].partition("\n\n")[0]
    return [line.split()[0].removeprefix("--") for line in overview.splitlines()]


def test_help_names_what_has_an_effect_on_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` named the learning rate and wandb, `eval` the training data, and `publish` nothing under a heading."""
    usual = {*usual_of(PlanConfig, capsys)}
    assert {"engine.offload_optimizer", "policy.gradient_checkpointing", "rollout.num_generations"} < usual
    assert {"policy.lr", "run.name", "log.wandb", "grpo.loss_type"}.isdisjoint(usual)
    assert "\n  log " not in help_of(PlanConfig, capsys) and "\n  engine " in help_of(PlanConfig, capsys)
    usual = {*usual_of(EvaluateConfig, capsys)}
    assert {"data.eval_path", "eval.sets"} < usual and {"data.path", "data.split"}.isdisjoint(usual)
    assert "settings to know first" not in help_of(PublishConfig, capsys)
    with pytest.raises(UserError, match=r"^data\.split is a setting of training, which eval does not use"):
        parse(EvaluateConfig, ["--data.split", "test"], "eval")


def test_help_says_bounds_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(TrainConfig, capsys, "policy")
    assert "--policy.lr\n      a finite number, greater than 0, default 1e-06\n      Peak learning rate." in text
    assert "bfloat16 or float32, default bfloat16" in text
    with pytest.raises(UserError, match="there is no section polcy: did you mean policy"):
        parse(TrainConfig, ["--help", "polcy"], "train")


def test_help_begins_with_the_command_s_own_and_the_usual_settings(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(GenerateConfig, capsys)
    order = ["usage: hybrid-grpo train", "--config FILE", "--generate.output", "--policy.model", "sections, each shown"]
    assert sorted(order, key=text.index) == order
    assert "--sft.batch_size" in help_of(SftConfig, capsys)
    lines = help_of(TrainConfig, capsys).splitlines()
    # The colon between the backticks once ended the line.
    assert any(line.endswith("Functions, as `exact_match,mine.py:f`") for line in lines)
    usual = [line for line in lines if re.match("  --[a-z]+[.a-z_]* ", line) and "config" not in line]
    assert len(usual) == 20 and len(lines) < 60
    assert any(re.search(r"--policy.lr +Peak learning rate \(1e-06\)", line) for line in usual)


def documented_fields() -> dict[str, dict[str, str]]:
    """What stands below every field of every section in the source; a field without it is an error."""
    found: dict[str, dict[str, str]] = {}
    package = ROOT / "hybrid_grpo"
    sources = [*package.glob("config/*.py"), *package.glob("features/*/settings.py"), *package.glob("**/options.py")]
    sources.append(package / "commands/configs.py")
    for section in (node for source in sources for node in ast.parse(source.read_text()).body):
        if isinstance(section, ast.ClassDef) and section.name.endswith("Config"):
            for field, below in zip(section.body, [*section.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    doc = (
                        below.value.value
                        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                        else ""
                    )
                    # A section says itself what it is.
                    assert doc or ast.unparse(field.annotation).endswith(("Config", "RewardList", "FeatureList")), (
                        field.target.id
                    )
                    found.setdefault(section.name, {})[field.target.id] = str(doc)
    return found


@pytest.mark.parametrize("cls", [TrainConfig, SftConfig, GenerateConfig])
def test_printed_config_gives_the_same_config(user: User, cls: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*user.sound, "--run.seed=3", "--data.system_prompt="]
    if cls is not GenerateConfig:
        arguments += ["--policy.lr=1e-6", "--policy.betas=[0.5,0.6]", "--run.name=1e3"]
        arguments += ["--engine.deepspeed", "{zero_optimization: {overlap_comm: false, bucket: 5e7}, name: '1e5'}"]
    if cls is TrainConfig:
        arguments += ["--rewards", "[{function: a.b:c, weight: 0.5, kwargs: {x: [1, no], y: '2'}}]"]
    with pytest.raises(SystemExit):
        parse(cls, [*arguments, "--print_config"], "train")
    printed = capsys.readouterr().out
    direct: Parsed[Any] = parse(cls, arguments, "train")
    again: Parsed[Any] = parse(cls, ["--config", user.yaml(printed)], "train")
    assert again.config == direct.config
    assert again.yaml == direct.yaml
    assert parse(cls, ["--config", user.yaml(direct.yaml)], "train").config == direct.config
