"""The whole of what a run leaves on wandb, read back from the file of an offline run."""

import json

import pytest
import wandb_file
from run_folder import write_lines

from hybrid_grpo.config import LogConfig
from hybrid_grpo.records.trackers import process
from hybrid_grpo.records.trackers.process import TrackerProcess
from hybrid_grpo.records.trackers.wandb import resolve_wandb_mode, run_id


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_wandb_is_online_only_with_an_account(no_account, monkeypatch, tmp_path):
    assert resolve_wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine elsewhere login user password x\n")
    assert resolve_wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert resolve_wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_wandb_mode("auto") == "disabled"
    assert resolve_wandb_mode("offline") == "offline", "a setting outranks the environment"


def test_a_key_in_the_environment_is_an_account_and_the_start_says_where_texts_go(no_account, monkeypatch, capsys):
    monkeypatch.setattr(process, "TrackerProcess", lambda *_: "started")
    for key, told in (("", ""), ("x" * 40, "prompts and completions go to api.wandb.ai; --log.wandb offline keeps")):
        monkeypatch.setenv("WANDB_API_KEY", key)
        assert process.start_tracker(LogConfig(), None, {}, -1) == "started"
        out = capsys.readouterr().out
        assert told in out and bool(out) == bool(told)
    assert process.start_tracker(LogConfig(wandb="disabled"), None, {}, -1) is None


def test_a_resumed_run_has_the_id_that_it_had_and_a_new_one_another(tmp_path):
    first = run_id(tmp_path / "wandb", resumes=True)
    assert run_id(tmp_path / "wandb", resumes=True) == first
    assert run_id(tmp_path / "wandb", resumes=False) != first


@pytest.mark.process
def test_an_offline_run_holds_every_metric_axis_table_picture_and_file(seeing, tmp_path, monkeypatch, capsys):
    folder = seeing
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "elsewhere"))
    told = {"wandb_entity": "team", "group": "seeds", "tags": ["a", "b"]}
    config = LogConfig(wandb="offline", histograms_every=2, wandb_project="sorting", **told)
    process = TrackerProcess(folder, config, {"policy": {"lr": 1e-4}}, limit_s=120)
    write_lines(folder / "metrics.jsonl", [{"step": 3, "reward/mean": 0.75, "reward/exact/mean": 0.5}])
    process.ask(failed=True)
    process.close(120)
    assert "upload with: wandb sync" in capsys.readouterr().out
    assert list((tmp_path / "temporary").iterdir()) == [], "wandb leaves a folder for each table"
    assert not (tmp_path / "elsewhere").exists() and not (folder / "wandb" / "staging").exists(), "nothing is left"
    found = wandb_file.records(folder)

    (run,) = wandb_file.of_kind(found, "run")
    assert (run.entity, run.project, run.display_name) == ("team", "sorting", "first")
    assert (run.run_group, list(run.tags)) == ("seeds", ["a", "b"])
    assert run.run_id == (folder / "wandb" / "id").read_text()
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert config["policy"] == {"lr": 1e-4}

    history = [wandb_file.items(record) for record in wandb_file.of_kind(found, "history")]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["_step"] for row in history] == [row["progress/step"] for row in history] == [1, 2, 3]
    for row, line in zip(history, lines, strict=True):
        logged = {name: None if row[name] != row[name] else row[name] for name in line if name != "step"}
        assert logged == {name: value for name, value in line.items() if name != "step"}
    assert [row["progress/tokens"] for row in history] == [18, 36, 36]
    assert [row["progress/hours"] for row in history] == [0.5, 1.0, 1.0]

    metrics = {metric.name: metric for metric in wandb_file.of_kind(found, "metric")}
    axes = {"progress/step", "progress/tokens", "progress/hours"}
    kinds = "_", "samples", "pictures"
    logged = {name.partition(".")[0] for row in history for name in row if not name.startswith(kinds)}
    assert metrics.keys() == logged >= {"reward/exact/mean", "distribution/reward"}
    assert {metric.step_metric for name, metric in metrics.items() if name not in axes} == {"progress/step"}
    assert all(metrics[name].options.hidden for name in axes)
    assert metrics["reward/mean"].summary.max and metrics["time/step_s"].summary.min
    last = [wandb_file.items(record) for record in wandb_file.of_kind(found, "summary")]
    assert next(row["reward/mean"] for row in reversed(last) if "reward/mean" in row) == {"last": 0.75, "max": 0.75}

    assert history[0]["distribution/reward._type"] == "histogram" and sum(history[0]["distribution/reward.values"]) == 9
    assert "distribution/reward._type" not in history[1], "every second step"
    media = folder / "wandb" / "latest-run" / "files" / "media"
    assert len(list((media / "images").iterdir())) == 2 and history[0]["pictures.count"] == 2
    files = (media / "table").iterdir()
    tables = [json.loads(file.read_text()) for file in files]
    assert [history[n]["samples._type"] for n in (0, 1)] == ["table-file"] * 2 and len(tables) == 2
    whys = {line[1]: line[0] for table in tables for line in table["data"]}
    assert tables[0]["columns"][:2] == ["why", "step"] and whys == {1: "worst", 2: "alarm"}, "the last of each step"
    (alert,) = wandb_file.of_kind(found, "alert")
    assert (alert.title, alert.text, alert.level) == ("Alarm at step 2", "the gap is wide", "WARN")
    kept = [artifact for artifact in wandb_file.of_kind(found, "artifact") if artifact.type == "run"]
    assert [[entry.path for entry in artifact.manifest.contents] for artifact in kept] == [
        ["config.yaml", "report.html"]
    ]
    (exit_record,) = wandb_file.of_kind(found, "exit")
    assert exit_record.exit_code == 1, "the run has failed"
