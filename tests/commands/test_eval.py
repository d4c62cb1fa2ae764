"""`eval`: which model it measures. What it measures is tested with the other commands, on a run."""

from pathlib import Path

import pytest

from hybrid_grpo.commands.eval import with_trained_models


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The config.yaml of a run that has not exported a model yet."""
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    return tmp_path / "config.yaml"


def test_a_run_is_measured_by_the_model_that_it_trained(recipe: Path) -> None:
    model = recipe.parent / "model"
    (model / "config.json").touch()
    chosen = f"--policy.model={model}"
    assert with_trained_models(["--config", str(recipe), "--a=1"]) == ["--config", str(recipe), chosen, "--a=1"]
    assert with_trained_models([f"--config={recipe}"]) == [f"--config={recipe}", chosen]


def test_a_model_that_is_named_wins_and_a_recipe_is_no_run(recipe: Path) -> None:
    (recipe.parent / "model" / "config.json").touch()
    for named in (["--policy.model", "x"], ["--policy.model=x"]):
        assert with_trained_models([*named, "--config", str(recipe)]) == [*named, "--config", str(recipe)]
    (recipe.parent / "metrics.jsonl").unlink()
    assert with_trained_models(["--config", str(recipe)]) == ["--config", str(recipe)]


def test_a_run_without_a_trained_model_says_so(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert with_trained_models(["--config", str(recipe)]) == ["--config", str(recipe)]
    assert "has no trained model: its starting model is measured" in capsys.readouterr().err
