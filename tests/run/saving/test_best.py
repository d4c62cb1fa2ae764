"""The best weights of a run, and a run that ends because it gets no better."""

import json
from pathlib import Path
from typing import Any

from hybrid_grpo.config import EvalConfig
from hybrid_grpo.records.exports import exported
from hybrid_grpo.run.saving.best import Best

METRIC = "eval/heldout/accuracy"


class Weights:
    """Stands for a policy whose weights are the number of its step; writing them fails where the disk is full."""

    def __init__(self, full_at: int = -1) -> None:
        self.step, self._full_at = 0, full_at

    def export(self, folder: Path) -> None:
        if self.step == self._full_at:
            raise OSError(28, "No space left on device")
        folder.mkdir()
        (folder / "weights").write_text(str(self.step))


def played(best: Best, policy: Any, values: list[float | None], first: int = 0) -> list[bool]:
    """Whether the run is to end after each of these steps."""
    ends = []
    for policy.step, value in enumerate(values, start=first):
        best.take(policy, policy.step, {"policy/loss": 1.0} if value is None else {METRIC: value})
        ends.append(best.exhausted)
    return ends


def kept(folder: Path) -> tuple[str, dict[str, float]]:
    return (folder / "model_best" / "weights").read_text(), exported(folder / "model_best")


def test_the_weights_of_the_best_evaluation_are_kept_and_patience_counts_the_others(tmp_path: Path) -> None:
    best = Best(EvalConfig(best=METRIC, patience=2), tmp_path)
    values = [0.5, None, 0.7, float("nan"), 0.7, None, 0.9, 0.8, 0.9]
    assert played(best, Weights(), values) == [False] * 8 + [True]
    assert kept(tmp_path) == ("6", {"step": 6, METRIC: 0.9})
    assert "accuracy 0.900 at step 6" in str(best) and best.models == 2


def test_without_the_setting_nothing_is_kept(tmp_path: Path) -> None:
    best = Best(EvalConfig(), tmp_path)
    assert played(best, Weights(), [0.5, 0.7]) == [False, False] and best.models == 1
    assert list(tmp_path.iterdir()) == []


def test_what_was_best_is_known_when_the_run_goes_on(tmp_path: Path) -> None:
    """Also where the weights are of a step that is made again, and where another number decides from now on."""
    config, values = EvalConfig(best=METRIC, patience=3), [0.5, 0.9, 0.6, 0.7]
    played(Best(config, tmp_path), Weights(), values)
    lines = [json.dumps({"step": step, METRIC: value}) for step, value in enumerate(values)]
    again = Best(config, tmp_path, [*lines, json.dumps({"step": 4, METRIC: None})])
    assert not again.exhausted, "two were not better; the best is none of them"
    assert played(again, Weights(), [0.8], first=5) == [True]
    before = Best(config, tmp_path, lines[:1])
    assert played(before, Weights(), [0.9, 0.6, 0.7, 0.8], first=1) == [False, False, False, True]
    assert kept(tmp_path) == ("1", {"step": 1, METRIC: 0.9})
    # A run that goes back: an abandoned value, which no model of the run had, was never beaten.
    before.go_back(3, lines)
    assert not before.is_beaten({METRIC: 0.75}), "its best one is of step 1"
    before.go_back(0, lines[:1])
    assert before.is_beaten({METRIC: 0.1}) and not before.exhausted
    # A run that branches off has the lines of the other, and none of its weights.
    assert not Best(config, tmp_path / "branch", lines).exhausted
    other = Best(EvalConfig(best="eval/other/accuracy"), tmp_path)
    policy: Any = Weights()
    other.take(policy, 6, {"eval/other/accuracy": 0.1})
    assert kept(tmp_path)[1] == {"step": 6, "eval/other/accuracy": 0.1}


def test_a_best_that_cannot_be_written_is_said_and_leaves_the_one_before(tmp_path: Path) -> None:
    policy: Any = Weights(full_at=1)
    best = Best(EvalConfig(best=METRIC), tmp_path)
    played(best, policy, [0.5])
    policy.step = 1
    warning = best.take(policy, 1, {METRIC: 0.9})
    assert warning.startswith(f"WARNING: {tmp_path / 'model_best'} could not be written: ")
    assert kept(tmp_path) == ("0", {"step": 0, METRIC: 0.5})
    played(best, policy, [0.8], first=2)
    assert kept(tmp_path)[0] == "2"
