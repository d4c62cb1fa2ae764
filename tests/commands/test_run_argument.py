"""A run as the first argument: of `train` and `sft`, to every command that reads recipes."""

import pytest
import yaml

from hybrid_grpo.commands import eval as evaluation
from hybrid_grpo.commands import generate
from hybrid_grpo.commands.arguments import is_run, options_of_run
from hybrid_grpo.commands.configs import ChatConfig, EvaluateConfig, GenerateConfig, ScoreConfig
from hybrid_grpo.config import SftConfig, TrainConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.kept_code import keep_code
from hybrid_grpo.config.parsing import configure, parse
from hybrid_grpo.config.user_code import import_object

STAGES = {
    "train": (TrainConfig, {"rewards": ["exact_match"], "eval": {"every": 5}, "data": {"eval_path": "h.jsonl"}}),
    "sft": (SftConfig, {"sft": {"batch_size": 8}}),
}


@pytest.fixture(params=STAGES)
def run(request, tmp_path):
    """The folder of a run with the settings of a stage."""
    cls, settings = STAGES[request.param]
    given = {**settings, "policy": {"model": "start"}, "data": {"path": "rows.jsonl", **settings.get("data", {})}}
    (tmp_path / "config.yaml").write_text(configure(cls, given).yaml)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    return tmp_path


@pytest.mark.parametrize("cls", [EvaluateConfig, GenerateConfig, ScoreConfig, ChatConfig])
def test_the_settings_of_any_run_are_a_recipe_for_every_command(run, cls):
    config = parse(cls, ["--config", str(run / "config.yaml")], "command").config
    assert config.policy.model == "start"


def test_a_run_keeps_the_files_of_its_rewards(tmp_path, monkeypatch):
    """`score RUN` failed in another folder, and scored with what rewards.py had become since."""
    (tmp_path / "mine/json").mkdir(parents=True)  # a folder of data, which is no module, though it is called like one
    (tmp_path / "mine/beside.py").write_text("VALUE = 0.5\n")
    (tmp_path / "mine/rewards.py").write_text(
        "import json\nfrom beside import VALUE\n\n\ndef f(_):\n    return VALUE\n"
    )
    monkeypatch.chdir(tmp_path)
    given = configure(TrainConfig, {"rewards": ["mine/rewards.py:f", "exact_match"]})
    run = tmp_path / "runs/run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(given.yaml)
    keep_code(yaml.safe_load(given.yaml), run)
    (tmp_path / "mine").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    for cls in (ScoreConfig, EvaluateConfig):
        kept, other = parse(cls, ["--config", str(run / "config.yaml")], "command").config.rewards
        assert import_object(kept.function, "rewards")([]) == 0.5 and other.function == "exact_match"
    assert parse(TrainConfig, ["--config", str(run / "config.yaml")], "train").config.rewards == given.config.rewards


def test_a_run_stands_for_its_settings_and_its_trained_model(run):
    options, _ = generate._options([str(run), "--rollout.temperature=0.5"])
    config = parse(GenerateConfig, options, "generate").config
    assert config.policy.model == f"{run}/model" and config.reads_stdin, "its prompts come from the user"
    named, _ = generate._options([str(run), "--data.path", "mine.jsonl"])
    assert parse(GenerateConfig, named, "generate").config.data.path == "mine.jsonl"
    config = parse(ChatConfig, options_of_run(str(run)), "chat").config
    assert config.policy.model == f"{run}/model"


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"^words is not the folder of a run: give .* usage: hybrid-grpo eval \[RUN\] \[opt"
    ):
        evaluation.run(["words"])
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="the run has no trained model yet"):
        generate._options([str(tmp_path)])
    (tmp_path / "adapter_config.json").touch()
    assert not is_run(str(tmp_path)), "a published model has the settings of its run beside it"
