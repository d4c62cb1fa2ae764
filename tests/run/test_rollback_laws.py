"""What a run that goes back to a checkpoint leaves behind it, and what one that goes on with other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from launching import make_task, ranks

from hybrid_grpo.config import GrpoConfig, RunConfig, TrainConfig
from hybrid_grpo.run import settings
from hybrid_grpo.run.saving.checkpoint import Checkpoints
from hybrid_grpo.run.settings import identity


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """See rollback_programs.py."""
    (seen,) = ranks(1, "back", make_task(tmp_path_factory.mktemp("task")), programs="rollback_programs.py")
    return seen


def steps(run: dict[str, Any]) -> list[int]:
    """The steps that were made, in order, each as often as it was."""
    return [step for k, (step, _) in enumerate(run["made"]) if k == 0 or run["made"][k - 1][0] != step]


def rates(run: dict[str, Any], name: str = "policy/lr") -> list[float]:
    return [line[name] for line in run["lines"] if name in line]


@pytest.mark.ranks
def test_a_run_goes_back_max_rollbacks_times_and_then_stops(runs):
    run = runs["without end"]
    assert [step for step, _ in run["made"]].count(3) == 3
    assert "guard.max_rollbacks is reached" in run["stopped"] and "no model was exported" in run["stopped"]


@pytest.mark.ranks
def test_no_checkpoint_is_written_in_doubt(runs):
    """The third step is the first bad one. What it learned would be gone back to, were it saved."""
    run = runs["in doubt"]
    assert steps(run) == [1, 2, 3, 4, 3, 4, 5] and not run["stopped"]
    of_step = [names for step, names in run["made"] if step == 4]
    assert of_step[0] == [f"step_{k:06d}" for k in range(3)], "without the third, which is in doubt"
    assert of_step[-1] == [f"step_{k:06d}" for k in range(4)]
    assert rates(run) == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4, 5e-4])
    # A step of which nothing came is no reason to go back; the one after it is saved.
    run = runs["doubt that was none"]
    assert steps(run) == [1, 2, 3, 4, 5] and rates(run) == pytest.approx([1e-3] * 5)
    assert [names[-1] for step, names in run["made"] if step == 5][-1] == "step_000004"


@pytest.mark.ranks
def test_the_critic_is_as_careful_as_the_policy(runs):
    run = runs["critic"]
    for name in ("policy/lr", "critic/lr"):
        assert rates(run, name) == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4, 5e-4]), name


@pytest.mark.ranks
def test_what_came_after_the_checkpoint_that_a_run_went_back_to_is_gone(runs):
    """The first step breaks the weights, which shows in the second; so the checkpoint of the first is no use either."""
    run = runs["broken weights"]
    assert not run["stopped"] and [line["step"] for line in run["lines"]] == [1, 2, 3, 4, 5]
    first = [names for step, names in run["made"] if step == 1]
    assert all(names == ["step_000000"] for names in first) and len(first) >= 2
    assert rates(run) == pytest.approx([1e-4] * 5)


def test_completions_of_a_step_that_other_settings_would_sample_are_not_taken_from_the_journal(tmp_path: Path) -> None:
    """A run that goes on as it was makes its broken step again, of which the journal has completions. With settings
    that decide on learning, or after going back, the step is another."""
    checkpoints = Checkpoints(tmp_path, keep=1)

    def of(beta: float, steps: int) -> str:
        return identity(
            TrainConfig(run=RunConfig(steps=steps), grpo=GrpoConfig(beta=beta)),
            checkpoints.inputs,
            checkpoints.rollbacks,
        )

    before = of(0.0, 9)
    assert of(0.0, 12) == before != of(0.1, 9)
    checkpoints.rollbacks += 1
    assert of(0.0, 9) != before


def test_the_settings_are_taken_apart_once_for_an_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of 200 settings, with types compiled anew, it took 24 seconds of every start."""
    taken, take = [], settings.settings_of
    monkeypatch.setattr(settings, "settings_of", lambda config: taken.append(config) or take(config))
    identity(TrainConfig(), {}, 0)
    assert len(taken) == 1
