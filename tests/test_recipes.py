"""The scripts that users start: what they hand to the launcher parses into a valid configuration."""

import ast
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from paths import ROOT
from warm_python import programs

from hybrid_grpo.config import GrpoConfig, RewardConfig, SftConfig, TrainConfig, build
from hybrid_grpo.config.checks import batch_plan, check_train
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.config.presets import presets

sys.path.append(str(ROOT / "benchmarks"))

import small_gpus

SCRIPTS = ROOT / "training_scripts"
RECIPES = sorted(path.name for path in SCRIPTS.glob("gsm8k_*.sh"))


def handed_over(script: str, tmp_path: Path, *arguments: str) -> list[list[str]]:
    """Run a recipe whose launcher, and programs that need its results, only write down arguments; return these."""
    calls = f'printf "%s\\x1f" "$@" >>"{tmp_path}/calls"; echo >>"{tmp_path}/calls"'
    # The environment that runs the tests is the one the recipe would have made: nothing is installed into it.
    python = f"""case "$*" in
        *"-m pip "*) ;;
        *"print(sys.prefix)"*) echo "{tmp_path}" ;;
        "-m hybrid_grpo.run.local_ranks"*) {calls} ;;
        *) exec "{programs()}/python" "$@" ;;
    esac"""
    for name, lines in (("python", python), ("deepspeed", calls)):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
        "SETUP_INTO_ACTIVE": "1",
        "RUNS": str(tmp_path / "runs"),
    }
    subprocess.run(["bash", str(SCRIPTS / script), *arguments], check=True, env=environment, capture_output=True)
    return [line.split("\x1f")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]


def test_what_scripts_and_pages_import_of_the_package_is_there():
    """The drawings of the pictures' recipe imported a module that was gone, which only a run on a GPU noticed."""
    files = [path for room in ("training_scripts", "examples", "benchmarks") for path in (ROOT / room).rglob("*.py")]
    programs = {str(path): path.read_text(encoding="utf-8") for path in files}
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        programs |= {f"{page} {number}": block for number, block in enumerate(blocks)}
    ours = []
    for place, program in programs.items():
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                ours += [(module + name.name, place) for name in node.names]
    ours = [(name, place) for name, place in ours if name.startswith("hybrid_grpo.")]
    assert len(ours) > 100
    absent = []
    for name, place in ours:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            absent.append(f"{place}: {name}")
    assert not absent


@pytest.mark.parametrize("script", RECIPES)
@pytest.mark.process
def test_a_recipe_parses_and_its_last_word_is_the_user_s(script, tmp_path, monkeypatch):
    (call,) = handed_over(script, tmp_path, "--run.steps", "7")
    settings = call[3:]
    monkeypatch.chdir(SCRIPTS.parent)
    assert call[:4] == ["-m", "hybrid_grpo.run.local_ranks", "2", "train"]
    config = parse(TrainConfig, settings[1:], "train").config
    ranks = 8 if "7b" in script else 1
    plan = check_train(config, ranks)
    assert config.run.steps == 7 and config.run.name == script.removesuffix(".sh")
    assert plan.world_size * plan.prompts_per_rank == config.rollout.prompts_per_step
    assert config.data.path == "openai/gsm8k" and config.rewards == [RewardConfig("numeric_answer")]
    if ranks == 8:
        assert config.engine.zero_stage == 3 and config.engine.offload_optimizer and config.grpo.beta > 0


@pytest.mark.process
def test_the_words_of_the_recipe_for_small_gpus_are_recipes(tmp_path, monkeypatch):
    """tests/test_plan_gpus.py plans what docs/memory.md says of them."""
    (call,) = handed_over("small_gpus.sh", tmp_path, "Qwen/Qwen2.5-7B-Instruct", "lora", "offload", "--run.steps", "7")
    monkeypatch.chdir(SCRIPTS.parent)
    config = parse(TrainConfig, call[call.index("train") + 1 :], "train").config
    expected = small_gpus.config_of("Qwen/Qwen2.5-7B-Instruct", "lora offload")
    name = "gsm8k_qwen2.5-7b-instruct_lora_offload"
    assert config == replace(expected, run=replace(expected.run, name=name, steps=7))
    with pytest.raises(subprocess.CalledProcessError):
        handed_over("small_gpus.sh", tmp_path)


@pytest.mark.parametrize("name", [name for name in presets() if name != "gdpo"])
def test_a_preset_goes_under_a_recipe_and_is_documented_as_it_is(name, monkeypatch):
    monkeypatch.chdir(SCRIPTS.parent)
    recipe = ["--config", "training_scripts/gsm8k.yaml", "--policy.model", "Qwen/Qwen2.5-0.5B-Instruct"]
    config = parse(TrainConfig, [*recipe, "--grpo.preset", name, "--grpo.num_minibatches", "4"], "train").config
    for ranks in (1, 8):
        assert check_train(config, ranks).num_minibatches == 4
    assert config.grpo == GrpoConfig(**{"preset": name, **DOCUMENTED[name], "num_minibatches": 4})


def documented_objectives() -> dict[str, dict]:
    """The rows of the table in docs/objectives.md: algorithm and fields."""
    rows = re.findall(r"^\| (.+?) \| `(\{.+?\})`", (SCRIPTS.parent / "docs/objectives.md").read_text(), re.MULTILINE)
    return {name: yaml.safe_load(fields) for name, fields in rows}


DOCUMENTED = documented_objectives()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_documented_objective_is_one(name):
    assert len(DOCUMENTED) > 12
    build(TrainConfig, {"grpo": DOCUMENTED[name], "rewards": ["a", "b"]})


@pytest.mark.process
def test_the_toy_warms_up_and_then_trains_on_what_it_made(tmp_path, monkeypatch):
    sft, train = handed_over("quickstart.sh", tmp_path, "--toy", "--run.steps", "3")
    monkeypatch.chdir(SCRIPTS.parent)
    warmup = parse(SftConfig, sft[sft.index("sft") + 1 :], "sft").config
    config = parse(TrainConfig, train[train.index("train") + 1 :], "train").config
    assert warmup.policy.model == str(tmp_path / "runs/letters-task/model")
    assert config.policy.model == str(tmp_path / "runs/letters-sft/model")
    assert config.run.steps == 3, "settings given to the quickstart go to the GRPO run"
    for ranks in (1, 2, 4, 8):
        plan = batch_plan(config, ranks)
        assert plan.rows // plan.num_minibatches == 512
    assert {path.name for path in (tmp_path / "runs/letters-task").iterdir()} == {
        "model", "sft.jsonl", "train.jsonl", "heldout.jsonl",
    }  # fmt: skip


@pytest.mark.process
def test_the_quickstart_takes_a_model_of_one_s_own_and_sets_a_finished_run_aside(tmp_path):
    finished = tmp_path / "runs/quickstart/metrics.jsonl"
    finished.parent.mkdir(parents=True)
    finished.write_text("mine")
    (call,) = handed_over("quickstart.sh", tmp_path, "--policy.model", "mine", "--data.path", "my.jsonl")
    assert call[call.index("train") :][-4:] == ["--policy.model", "mine", "--data.path", "my.jsonl"]
    assert not (tmp_path / "runs/letters-task").exists()
    (kept,) = (tmp_path / "runs").glob("quickstart.*")
    assert (kept / "metrics.jsonl").read_text() == "mine"


@pytest.mark.process
@pytest.mark.parametrize(("recipe", "script"), [("letters", ["quickstart.sh", "--toy"]), ("pictures", ["pictures.sh"])])
def test_a_run_of_another_name_moves_no_other_and_starts_from_the_warm_up(tmp_path, recipe, script):
    """It moved the default run, its task and its warm-up aside, and made them again."""
    names = [recipe, f"{recipe}-sft", f"{recipe}-task", "x"]
    for name in names:
        (tmp_path / "runs" / name / "model").mkdir(parents=True)
    (call,) = handed_over(script[0], tmp_path, *script[1:], "--run.name", "x")
    assert "train" in call and call[-2:] == ["--run.name", "x"]
    *others, aside = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert others == names[:3] and aside.startswith("x.")


@pytest.mark.process
def test_a_quickstart_that_is_resumed_stays_where_it_is(tmp_path):
    """Its run was set aside, and begun over."""
    for name in ("letters-task/train.jsonl", "letters-sft/model/config.json", "letters/metrics.jsonl"):
        path = tmp_path / "runs" / name
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    for option in (["--run.resume", "auto"], ["--run.resume=auto"]):
        # What it made before is there, so only the GRPO run is left.
        train = handed_over("quickstart.sh", tmp_path, "--toy", *option)[-1]
        assert train[-len(option) :] == option
    assert len((tmp_path / "calls").read_text().splitlines()) == 2
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["letters", "letters-sft", "letters-task"]
    assert (tmp_path / "runs/letters/metrics.jsonl").read_text() == "mine"


@pytest.mark.process
def test_the_quickstart_trains_a_model_from_the_package_index_on_one_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GRPO_CACHE", str(tmp_path))
    weights = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    weights.touch()
    (call,) = handed_over("quickstart.sh", tmp_path, "--run.steps", "7")
    assert call[:4] == ["-m", "hybrid_grpo.run.local_ranks", "1", "train"]
    monkeypatch.chdir(SCRIPTS.parent)
    config = parse(TrainConfig, call[4:], "train").config
    assert (config.policy.model, config.run.steps, config.data.task[:4]) == (str(weights), 7, "gym/")
    assert (config.policy.dtype == "bfloat16") == ("_bf16" in Path("/proc/cpuinfo").read_text())
    (tmp_path / "calls").unlink()
    (call,) = handed_over("quickstart.sh", tmp_path, "--policy.model", "mine/or-of-the-hub")
    assert parse(TrainConfig, call[4:], "train").config.policy.model == "mine/or-of-the-hub"


def test_held_out_words_are_in_no_other_split(tmp_path):
    sys.path.insert(0, str(SCRIPTS))
    from letters_task import ROWS, make_rows

    rows = make_rows(seed=1)
    words = {split: {row["prompt"] for row in rows[split]} for split in rows}
    assert {split: len(words[split]) for split in rows} == ROWS
    assert not words["heldout"] & (words["train"] | words["sft"]) and not words["train"] & words["sft"]
    assert all(re.fullmatch(r"[a-z]{3,6}=", word) for split in words.values() for word in split)
    assert all(row["answer"] == "".join(sorted(row["prompt"][:-1])) for row in rows["heldout"])
