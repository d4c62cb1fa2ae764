"""When a run saves itself, and what it does when that fails."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hybrid_grpo.config import RunConfig, TrainConfig, dump
from hybrid_grpo.config.errors import RunStopped, UserError
from hybrid_grpo.config.parsing import Parsed
from hybrid_grpo.config.run import CheckpointConfig
from hybrid_grpo.model.kernels import gpu
from hybrid_grpo.records.write_failures import WriteFailed
from hybrid_grpo.run import training
from hybrid_grpo.run.saving import saver as savers
from hybrid_grpo.run.saving.manifest import Manifest
from hybrid_grpo.run.settings import settings_of
from hybrid_grpo.run.stage import Stage
from hybrid_grpo.run.stopping import status
from hybrid_grpo.run.training import TrainingRun


class Clock:
    seconds = 1000.0

    def monotonic(self):
        return self.seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(savers, "time", clock)
    return clock


def make(tmp_path, grace_s=None, **checkpoint):
    """A run of nine steps whose checkpoints are only counted, and a stage for it."""
    settings = RunConfig("run", str(tmp_path), steps=9, grace_s=grace_s)
    run = TrainingRun(Parsed(TrainConfig(run=settings, checkpoint=CheckpointConfig(**checkpoint)), ""), {}, None)
    stage = Stage(SimpleNamespace(engine=SimpleNamespace(device="cpu"), state_dict=dict), None, services=run.services)
    run.checkpoints = run.saver.checkpoints = SimpleNamespace(save=lambda *_: None)
    return run, stage


def saved(run, stage, clock, steps, minutes):
    """The steps that a checkpoint follows, where each takes so many minutes."""
    found = []
    for step in steps:
        clock.seconds += 60 * minutes
        if run.saver.is_due(step, stage):
            run.saver.save(stage, step, {})
            found.append(step)
    return found


@pytest.mark.parametrize("checkpoint, minutes, expected", [
    ({}, 1, [9]),
    ({}, 4, [4, 8, 9]),
    ({}, 20, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ({"every_minutes": 2.5}, 1, [3, 6, 9]),
    ({"every": 4, "every_minutes": 0}, 99, [4, 8, 9]),
    # One that was due by number counts for the clock as well.
    ({"every": 4}, 6, [3, 4, 7, 8, 9]),
    ({"every": 0, "every_minutes": 0}, 99, []),
])  # fmt: skip
def test_checkpoints_follow_the_clock_and_the_number_of_steps(tmp_path, clock, checkpoint, minutes, expected):
    run, stage = make(tmp_path, **checkpoint)
    assert saved(run, stage, clock, range(1, 10), minutes) == expected


def test_a_checkpoint_without_what_later_settings_need_is_refused(tmp_path):
    run, stage = make(tmp_path)
    stage.policy.load_state_dict, stage.parts = lambda state: None, {"average": object()}
    run.checkpoints.load = lambda *_: {"policy": {}, "loader": {}}
    checkpoint = SimpleNamespace(folder="checkpoints/step_000003", manifest=SimpleNamespace(lr_scale=None))
    with pytest.raises(UserError, match="step_000003 was made without average: remove its settings"):
        savers.load_stage(stage, run.checkpoints, checkpoint)


def content(folder):
    """Everything in a run's folder but what its processes say and hold."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("console.log", ".lock"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_checkpoint_by_its_path_branches_off_or_goes_back(tmp_path, capsys):
    """In another folder the numbers so far come along; in its own what came after it is given up, once nothing can be
    refused any more. A refused start had deleted the later checkpoints, and written its settings for those of the
    model; an old model had passed for that of the new steps."""

    def config(name, resume):
        return TrainConfig(run=RunConfig(dir=str(tmp_path), steps=9, name=name, resume=resume))

    folder = tmp_path / "run"
    for step in (2, 4, 6):
        (folder / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        manifest = Manifest("0" * 16, step, 1, 0, settings_of(config("run", "auto")), {})
        manifest.write(folder / "checkpoints" / f"step_{step:06d}")
    lines = [f'{{"step": {step}}}\n' for step in range(7)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    for name, facts in (("model", {"step": 6}), ("model_best", {"step": 5, "a": 0.5}), ("model_ema", {"step": 4})):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(json.dumps(facts))
    path = str(folder / "checkpoints" / "step_000004")
    stage, before = Stage(SimpleNamespace(engine=None, load_state_dict=lambda _: None), None), content(folder)

    def begun(name):
        run = TrainingRun(Parsed(config(name, path), ""), {}, None)
        run.checkpoints.load = refuses
        with pytest.raises(UserError, match="another model"):
            run.restore(stage)
        assert content(folder) == before
        run.checkpoints.load = lambda *_: {"policy": {}}
        assert run.restore(stage) == 4
        return run

    def refuses(*_):
        raise UserError("it was made with another model")

    fork = begun("fork")
    assert (tmp_path / "fork" / "metrics.jsonl").read_text() == "".join(lines[:5])
    # It saves itself first of all: its folder has no checkpoint.
    assert (fork.start.step, fork.saver.step) == (4, None) and not fork.checkpoints.tags()
    assert content(folder) == before
    back = begun("run")
    assert (back.start.step, back.saver.step) == (4, 4) and back.checkpoints.tags() == ["step_000004", "step_000002"]
    assert (folder / "metrics.jsonl").read_text() == "".join(lines[:5])
    assert (folder / "config.yaml").read_text().endswith(dump(config("run", path)))
    kept = {"abandoned_1.model", "abandoned_1.model_best", "model_ema"}
    assert {file.parent.name for file in folder.glob("*/run.json")} == kept
    assert "model, of the abandoned step 6, is kept as abandoned_1.model: remove it" in capsys.readouterr().out


def test_a_save_that_fails_is_said_or_stops_the_run(tmp_path, clock, capsys):
    def fails(*_):
        raise WriteFailed("checkpoint step_000003 could not be written: Disk quota exceeded")

    run, stage = make(tmp_path)
    run.saver.save(stage, 2, {})
    run.checkpoints.save = fails
    run.saver.save(stage, 3, {})
    says = "checkpoint step_000003 could not be written: Disk quota exceeded; the newest one is from step 2"
    assert f"WARNING: {says}, and the run continues (checkpoint.on_failure say)" in capsys.readouterr().out
    # The next one is tried when it is due, and not after every step.
    assert saved(run, stage, clock, [4, 5], 1) == []
    run, stage = make(tmp_path / "other", on_failure="stop")
    run.checkpoints.save = fails
    with pytest.raises(RunStopped, match=r"Disk quota exceeded; there is none before it: make room or fix the cause"):
        run.saver.save(stage, 0, {})


@pytest.mark.parametrize(("setting", "seconds"), [(None, 20 + 2 * 40), (5.0, 5)])
def test_a_stop_has_the_time_that_saving_takes(tmp_path, clock, monkeypatch, setting, seconds):
    """A rank that wrote 11 GB to a network disk was killed after 20 s."""
    run, stage = make(tmp_path, setting)
    monkeypatch.setattr(status, "_of_this_process", [status.SharedStatus()])
    monkeypatch.setattr(status.SharedStatus, "listen", lambda *_, **__: None)
    stage.progress.start()
    assert status.own_status().mine.grace_s == (setting or 20)

    def save(*_):
        clock.seconds += 40

    run.checkpoints.save = save
    run.saver.save(stage, 1, {})
    assert status.own_status().mine.grace_s == seconds


def test_a_checkpoint_beside_the_run_counts_once_it_is_in_place(tmp_path, monkeypatch, capsys):
    run, stage = make(tmp_path)
    monkeypatch.setattr(status, "_of_this_process", [status.SharedStatus()])
    monkeypatch.setattr(status.SharedStatus, "listen", lambda *_, **__: None)
    stage.progress.start()
    ready, room = [False, True], [True, False, False]
    run.checkpoints.begin = lambda *_, copy: room.pop(0)
    run.checkpoints.is_ready = lambda device: ready.pop(0)
    run.checkpoints.finish = lambda: 40.0
    run.saver.save(stage, 2, {}, beside=True)
    run.saver.look(stage)
    assert (run.saver.step, ready) == (None, [True])
    run.saver.look(stage)
    assert (run.saver.step, ready) == (2, []) and status.own_status().mine.grace_s == 20 + 2 * 40
    # Nothing is under way, so nothing is asked; and without memory for a copy they are waited for.
    for step in (3, 4):
        run.saver.look(stage)
        run.saver.save(stage, step, {}, beside=True)
        assert run.saver.step == step
    says = "checkpoint.asynchronous: the host lacks memory for a copy, so training waits for checkpoints"
    assert capsys.readouterr().out.count(says) == 1 and room == []
    run, stage = make(tmp_path / "other", asynchronous=False)
    run.saver.save(stage, 2, {}, beside=True)
    assert run.saver.step == 2


def test_what_fails_beside_the_run_is_said_when_it_is_seen(tmp_path, capsys):
    def fails():
        raise WriteFailed("checkpoint step_000003 could not be written: Disk quota exceeded")

    for on_failure in ("say", "stop"):
        run, stage = make(tmp_path / on_failure, on_failure=on_failure)
        run.checkpoints.begin, run.checkpoints.finish = lambda *_, copy: True, fails
        run.checkpoints.is_ready = lambda device: True
        run.saver.save(stage, 3, {}, beside=True)
        if on_failure == "say":
            run.saver.look(stage)
            run.saver.finish(stage)
            assert (
                capsys.readouterr().out.count("WARNING: checkpoint step_000003 could not be written: Disk quota") == 1
            )
        else:
            with pytest.raises(RunStopped, match="Disk quota exceeded; there is none before it"):
                run.saver.save(stage, 4, {})
        assert run.saver.step is None


def test_a_report_that_cannot_be_written_is_said_and_changes_nothing(tmp_path, capsys):
    run, _ = make(tmp_path)

    def write_report(folder):
        raise KeyError("broken")

    with pytest.raises(RunStopped), run._reported(write_report):
        raise RunStopped("checkpoint step_000000 could not be written: No space left on device")
    assert "report.html" not in capsys.readouterr().out, "there is nothing to report"
    (run.folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with run._reported(write_report):
        pass
    with pytest.raises(RunStopped, match="this is why"), run._reported(write_report):
        raise RunStopped("this is why")
    lines = [line for line in capsys.readouterr().out.splitlines() if "report.html" in line]
    again = f"hybrid-grpo report {run.folder} writes it again"
    assert lines == [f"WARNING: report.html could not be written: 'broken': {again}"] * 2


def test_numbers_are_on_the_disk_before_the_checkpoint_that_follows_them(tmp_path, monkeypatch):
    """A power cut left a checkpoint beside a metrics.jsonl of 0 bytes, and the numbers were gone."""
    run, stage = make(tmp_path)
    order = []
    (run.folder / "rollouts").mkdir()
    (run.folder / "metrics.jsonl").touch()
    monkeypatch.setattr(savers, "sync", lambda path: order.append(path.name))
    run.checkpoints.save = lambda *_: order.append("checkpoint")
    run.saver.save(stage, 1, {})
    assert order == ["metrics.jsonl", "rollouts", "run", "checkpoint"]


def test_the_ranks_that_do_without_a_kernel_are_named_after_the_first_step(tmp_path, monkeypatch, capsys):
    """A rank without a kernel warned on its own output alone, and all others waited for it."""
    run, stage = make(tmp_path)
    run.start, stage.step = SimpleNamespace(step=0), lambda step: None
    profiler = SimpleNamespace(step=lambda *_: nullcontext())
    fails = Mock(side_effect=RuntimeError("no compiler\nat all"))
    gpu.fallbacks.clear()
    with pytest.warns(UserWarning, match="^sampling is slower without a Triton kernel: no compiler$"):
        assert not gpu.tried("sampling", fails)
    monkeypatch.setattr(training, "world_size", lambda: 4)
    monkeypatch.setattr(training, "all_gather_objects", lambda own: [{}, own, {}, {**own, "decoding without X": "Y"}])
    for step in (1, 2):
        run._make_step(stage, step, profiler, None)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert line.endswith("ranks 1 3: sampling without a Triton kernel: no compiler; ranks 3: decoding without X: Y")
