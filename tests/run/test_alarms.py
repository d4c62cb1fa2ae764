"""When alarms go off, and when they are said."""

import json
from types import SimpleNamespace

import pytest

from hybrid_grpo.config import LogConfig, RunConfig, TrainConfig
from hybrid_grpo.config.parsing import Parsed
from hybrid_grpo.run.alarms import Alarms
from hybrid_grpo.run.run import Run
from hybrid_grpo.run.stage import Stage


def played(steps: list[dict[str, float]], limit: float = 0.05) -> list[str | None]:
    alarms = Alarms(LogConfig(heldout_alarm=limit))
    return [next(iter(alarms.watch(step, values)), None) for step, values in enumerate(steps)]


def line(reward: float | None, accuracy: float | None = None) -> dict[str, float]:
    return {
        **({} if reward is None else {"reward/mean": reward}),
        **({} if accuracy is None else {"eval/heldout/accuracy": accuracy, "eval/heldout/reward_mean": 0.25}),
    }


def test_a_training_reward_that_rises_while_accuracy_falls_is_an_alarm():
    steps = [line(None, 0.5), line(0.2), line(0.4, 0.6), line(0.5), line(0.6, 0.57), line(0.7), line(0.8, 0.5)]
    said = played(steps)
    assert said[:-1] == [None] * 6, "0.57 is within the limit of 0.6"
    assert said[-1].startswith(
        "held-out accuracy is 0.500 after 0.600 at step 2, while the training reward rose from 0.300 to 0.750: "
    )
    assert [s["health/alarm"] for s in steps if "health/alarm" in s] == [0.0, 0.0, 0.0, 1.0]
    assert steps[4]["health/heldout_gap"] == pytest.approx(0.35) and "health/heldout_gap" not in steps[0]


def test_every_set_is_compared_with_its_own_best():
    """One set is evaluated at steps 0, 2 and 4, the other at 0 and 4 only, by another level."""
    often = [0.5, None, 0.6, None, 0.5]
    steps = [line(None if step == 0 else 0.2 * step, accuracy) for step, accuracy in enumerate(often)]
    for step in (0, 4):
        steps[step] |= {"eval/rare/accuracy": 0.9, "eval/rare/reward_mean": 0.75}
    said = played(steps)
    assert said[:-1] == [None] * 4 and said[-1].startswith(
        "held-out accuracy of heldout is 0.500 after 0.600 at step 2"
    )
    assert [s.get("health/heldout_gap") for s in steps[2::2]] == pytest.approx([0.15, 0.55])
    steps[4]["eval/heldout/accuracy"], steps[4]["eval/rare/accuracy"] = 0.6, 0.8
    assert played(steps)[-1].startswith("held-out accuracy of rare is 0.800 after 0.900 at step 0")


@pytest.mark.parametrize(
    "steps",
    [
        [line(None, 0.5), line(0.5), line(0.4, 0.3), line(0.3, 0.2)],
        [line(None, 0.5), line(0.2), line(0.4, 0.47), line(0.6, 0.46)],
        [line(0.2), line(0.4)],
    ],
    ids=["both fall", "a little", "no evaluation"],
)
def test_no_alarm_without_both(steps):
    assert played(steps) == [None] * len(steps)


def test_accuracy_that_falls_below_that_of_the_start_is_an_alarm():
    assert played([line(None, 0.5), line(0.2), line(0.4, 0.4)])[-1].startswith("held-out accuracy is 0.400 after 0.500")


def test_a_resumed_run_knows_its_best_evaluation(tmp_path, capsys):
    run = Run(Parsed(TrainConfig(run=RunConfig(name="run", dir=str(tmp_path))), ""), {})
    lines = [{"step": step, **numbers} for step, numbers in enumerate([line(None, 0.5), line(0.2), line(0.4, 0.9)])]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(of | {"policy/loss": None}) + "\n" for of in lines))
    # Its checkpoint is of the step before the last line.
    run.start = SimpleNamespace(checkpoint="step_000001", step=1)
    run.checkpoints = SimpleNamespace(load=lambda engine, checkpoint, shards: {"policy": {}, "step": 1})
    stage = Stage()
    stage.policy, stage.parts = SimpleNamespace(engine=None, average=None, load_state_dict=lambda state: None), {}
    assert run.restore(stage) == 1
    assert run.watched(2, line(0.6, 0.4))["health/alarm"] == 1.0
    assert "held-out accuracy is 0.400 after 0.500 at step 0" in capsys.readouterr().out
