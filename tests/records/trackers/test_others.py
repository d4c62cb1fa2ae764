"""TensorBoard, trackio and MLflow: what they are told, and, where they are installed, what they then hold."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_grpo.config import LogConfig
from hybrid_grpo.records.trackers.follower import make
from hybrid_grpo.records.trackers.steps import TrackedSteps

CONFIG = LogConfig(wandb_project="sorting", group="seeds", tags=["a"], notes="why", histograms_every=2)
SETTINGS = {"policy": {"lr": 1e-4, "betas": [0.9, 0.99]}, "data": {}}


class Calls:
    """Stands in for a package: keeps every call of its functions by name."""

    def __init__(self):
        self.made = {}

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.made.setdefault(name, []).append((args, kwargs))
            return SimpleNamespace(call=name, args=args, kwargs=kwargs, info=SimpleNamespace(run_id="7"))

        return call


def show(name, folder, resumes=False, settings=SETTINGS):
    tracker = make(name, folder, CONFIG, settings, resumes)
    for entry in TrackedSteps(folder, -1, CONFIG.histograms_every).new():
        tracker.write(entry)
    tracker.close([folder / "report.html"], failed=True)
    return tracker


def test_trackio_is_told_every_step_with_its_samples_and_alarms(folder, monkeypatch):
    trackio = Calls()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    assert show("trackio", folder).greeting == "trackio: trackio show --project sorting"
    (((), begun),) = trackio.made["init"]
    assert (begun["project"], begun["name"], begun["group"], begun["resume"]) == ("sorting", "first", "seeds", "never")
    assert begun["config"] == {**SETTINGS, "tags": ["a"], "notes": "why"}
    (((first,), at), ((second,), _)) = trackio.made["log"]
    assert at == {"step": 1} and (first["reward/mean"], second["progress/tokens"]) == (0.5, 36.0)
    assert first["distribution/length"].args == ([3] * 9,) and "distribution/length" not in second
    assert second["samples"].kwargs["columns"][0] == "why"
    assert trackio.made["alert"] == [(("Alarm at step 2", "the gap is wide"), {})] and len(trackio.made["finish"]) == 1
    show("trackio", folder, resumes=True)
    assert trackio.made["init"][1][1]["resume"] == "allow"


def test_mlflow_is_told_what_it_can_hold_and_goes_on_with_the_run_of_a_resumed_one(folder, monkeypatch):
    mlflow = Calls()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    show("mlflow", folder, settings=SETTINGS | {"run": {"name": "n" * 7000}})
    assert mlflow.made["set_experiment"] == [(("sorting",), {})]
    assert mlflow.made["start_run"] == [((), {"run_id": None, "run_name": "first", "description": "why"})]
    (((parameters,), _),) = mlflow.made["log_params"]
    assert len(parameters.pop("run.name")) == 6000, "MLflow takes no more"
    assert (parameters,) == ({"policy.lr": "0.0001", "policy.betas": "[0.9, 0.99]", "data": "{}"},)
    assert mlflow.made["set_tags"] == [(({"group": "seeds", "a": "true"},), {})]
    (((first,), at), ((second,), _)) = mlflow.made["log_metrics"]
    assert at == {"step": 1} and "policy/loss" not in first, "NaN"
    assert second["eval/heldout/accuracy"] == 0.125
    assert mlflow.made["set_tag"] == [(("alarm_step_2_0", "the gap is wide"), {})]
    assert [args[1] for args, _ in mlflow.made["log_dict"]] == ["samples/step_000001.json", "samples/step_000002.json"]
    assert mlflow.made["log_artifact"] == [((str(folder / "report.html"),), {})]
    assert mlflow.made["end_run"] == [(("FAILED",), {})]
    show("mlflow", folder, resumes=True)
    assert mlflow.made["start_run"][1][1]["run_id"] == "7" and len(mlflow.made["log_params"]) == 1


def test_tensorboard_reads_back_every_number_histogram_sample_and_alarm(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    show("tensorboard", folder)
    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        step = line.pop("step")
        for name, value in line.items():
            (event,) = [event for event in found.Scalars(name) if event.step == step]
            assert math.isnan(event.value) if value is None else event.value == pytest.approx(value)
    assert [event.value for event in found.Scalars("progress/tokens")] == [18, 36]
    (histogram,) = found.Histograms("distribution/reward")
    assert (histogram.histogram_value.num, histogram.histogram_value.max) == (9, 4)
    assert sum(histogram.histogram_value.bucket) == 9
    texts = {
        tag: [e.tensor_proto.string_val[0].decode() for e in found.Tensors(tag)] for tag in found.Tags()["tensors"]
    }
    assert texts["alarms"] == ["the gap is wide"] and '"lr": 0.0001' in texts["config"][0]
    assert texts["samples"][0].startswith("**best**, group 2, reward 4.0, 3 tokens, stop\n\n    sort: ba\n    \n    22")
    show("tensorboard", folder, resumes=True)
    found.Reload()
    assert [event.step for event in found.Scalars("reward/mean")] == [1, 2], (
        "what the resumed run writes again counts once"
    )


@pytest.mark.parametrize("library", ["tensorboard", "trackio", "mlflow"])
def test_a_few_pictures_are_shown(library, seeing, monkeypatch):
    if library == "tensorboard":
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        show(library, seeing)
        found = EventAccumulator(str(seeing / "tensorboard")).Reload()
        assert [(e.width, e.height) for n in (0, 1) for e in found.Images(f"pictures/{n}")] == [(1, 3), (2, 3)]
        return
    calls = Calls()
    monkeypatch.setitem(sys.modules, library, calls)
    show(library, seeing)
    if library == "trackio":
        ((first,), _), _ = calls.made["log"]
        assert [Path(of.args[0]).name for of in first["pictures"]] == ["1.png", "2.png"]
    else:
        told = [(Path(args[0]).name, args[1]) for args, _ in calls.made["log_artifact"][:-1]]
        assert told == [("1.png", "pictures/step_000001"), ("2.png", "pictures/step_000001")]


def test_mlflow_reads_back_every_number(folder, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.chdir(tmp_path)  # where MLflow puts artifacts
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    show("mlflow", folder)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("sorting").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.25)]
    assert (run.info.status, run.data.params["policy.lr"]) == ("FAILED", "0.0001")
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"report.html", "samples"}


def test_trackio_reads_back_every_number(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    trackio = pytest.importorskip("trackio")
    show("trackio", folder)
    (run,) = trackio.Api().runs("sorting")
    logs = trackio.SQLiteStorage.get_logs("sorting", "first")
    assert [(log["step"], log["reward/mean"], log["progress/tokens"]) for log in logs] == [(1, 0.5, 18), (2, 0.25, 36)]
    assert run.name == "first" and run.alerts()[0]["text"] == "the gap is wide"
