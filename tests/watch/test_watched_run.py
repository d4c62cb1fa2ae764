import json
import os
import shutil

import pytest

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.records.alarm_records import AlarmRecord, write_alarm
from hybrid_grpo.records.lock import FolderLock
from hybrid_grpo.records.trackers import growing_files
from hybrid_grpo.watch import metrics_file
from hybrid_grpo.watch.folders import Folders
from hybrid_grpo.watch.watched_run import WatchedRun


def run_lines():
    """What a run logs that is evaluated every tenth step."""
    lines = []
    for step in range(41):
        values = {"time/step_s": 2.0, "completion/sampled_tokens": 100.0} if step else {}
        values |= {"reward/mean": step / 40}
        if step % 10 == 0:
            values |= {"eval/heldout/accuracy": [0.5, 0.6, 0.4, 0.4, 0.7][step // 10], "time/eval_s": 10.0}
        lines.append({"step": step, **values})
    return lines


def opened(folder):
    run = WatchedRun(folder.name, folder)
    run.refresh(10)
    return run


def test_alarms_are_told_in_the_words_of_the_run(make_run):
    """Also in a copy of the folder."""
    folder = make_run("sick", run_lines())
    write_alarm(folder, AlarmRecord(7, "parity", 5, "the gap is wide", "stop"))
    run = opened(folder)
    first = AlarmRecord(7, "parity", 5, "the gap is wide")
    assert run.alarms() == [first]
    write_alarm(folder, AlarmRecord(10, "parity", 5, "", "stop", 9))
    with (folder / "alarms.jsonl").open("a") as file:
        file.write('{"step": 3')
    assert run.alarms() == [AlarmRecord(7, "parity", 5, "the gap is wide", until=9)]
    copied = shutil.copytree(run.folder, run.folder.parent / "copied")
    assert opened(copied).alarms() == run.alarms()
    (folder / "alarms.jsonl").write_text("damaged\n")
    assert run.alarms() == opened(make_run("none", [])).alarms() == []


def test_axes_are_steps_tokens_and_hours_of_work(make_run, monkeypatch):
    folder = make_run("run", run_lines())
    run = opened(folder)
    assert run.axis("step")[-1] == 40
    assert run.axis("tokens").tolist() == [100.0 * step for step in range(41)]
    assert run.axis("hours")[-1] == pytest.approx((40 * 2 + 5 * 10) / 3600)
    first = opened(make_run("later", [{"step": 1, "sft/tokens": 64.0}, {"step": 2, "sft/tokens": 32.0}]))
    assert first.axis("tokens").tolist() == [64.0, 96.0]
    assert opened(make_run("empty", [])).axis("hours").tolist() == []
    # From lines all over a file that is not yet read: each stands for the steps before it too.
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "completion/sampled_tokens": 100.0}) + "\n" for step in range(20_000))
    )
    monkeypatch.setattr(metrics_file, "_GLIMPSE_OVER", 10_000)
    monkeypatch.setattr(growing_files, "_CHUNK", 1_000)
    run = WatchedRun("run", folder)
    run.refresh(0)
    assert run.numbers.share_read < 1
    assert run.axis("tokens")[-1] == pytest.approx(2_000_000)


def test_runs_are_compared_by_their_newest_and_best_numbers(make_run):
    run = opened(make_run("run", run_lines()))
    numbers = {entry["name"]: entry for entry in run.summary()["numbers"]}
    accuracy = numbers["eval/heldout/accuracy"]
    assert (accuracy["value"], accuracy["best"], accuracy["best_step"]) == (0.7, 0.7, 40)
    assert (numbers["reward/mean"]["first"], numbers["reward/mean"]["value"]) == (0.0, 1.0), (
        "as the chart and report --text"
    )
    assert run.summary()["step_seconds"] == 2.0 and run.summary()["closest"] is None
    ways = [
        {"step": step, f"health/closest/{'kl' if step < 5 else 'ratio'}": [0.1, 0.9, 0.5][step % 3]}
        for step in range(9)
    ]
    assert opened(make_run("near", ways)).summary()["closest"] == (pytest.approx(0.9), "health/closest/ratio")


@pytest.mark.parametrize("config", ["", "- list", "policy: [", "policy: 3\nrun: null\nlog: null"])
def test_a_folder_with_a_damaged_config_is_shown_all_the_same(make_run, config):
    run = opened(make_run("run", run_lines(), config))
    assert run.outline()["step"] == 40


def test_runs_are_found_under_the_folders_that_were_named(make_run, tmp_path):
    """Also those that come later; two of the same name are told apart; a folder that is named twice is one run."""
    one = make_run("one", [])
    named = [tmp_path / "runs", one, tmp_path / "elsewhere"]
    named[2].mkdir()
    folders = Folders(named)
    (run,) = folders.look().values()
    assert run.name == "one"
    shutil.copytree(one, tmp_path / "elsewhere/seed1/one")
    make_run("two", [])
    runs = folders.look()
    assert {name: run.folder for name, run in runs.items()} == {
        "one": one, "two": tmp_path / "runs/two", "seed1/one": tmp_path / "elsewhere/seed1/one",
    }  # fmt: skip
    assert runs["one"] is run
    shutil.rmtree(one)
    assert "one" not in folders.look()
    with pytest.raises(UserError, match="nothing is not a folder"):
        Folders([tmp_path / "nothing"])


def test_a_run_says_whether_it_runs_has_ended_or_was_killed(make_run, tmp_path):
    folder, loading = make_run("run", run_lines()), tmp_path / "runs/loading"
    loading.mkdir()
    lock = loading / ".lock"
    run = WatchedRun("run", folder)
    assert run.outline()["state"] is None, "a copy without its lock"
    held = FolderLock(folder)
    assert run.outline()["state"] == "running"
    os.utime(folder / ".lock", (0, 0))
    assert run.outline()["state"] == "gone"
    held.release()
    assert run.outline()["state"] == "ended"
    assert set(Folders([tmp_path]).runs) == {"run"}
    lock.write_text("{}")
    outlines = {name: each.outline() for name, each in Folders([tmp_path]).runs.items()}
    assert outlines["loading"]["state"] == "running" and outlines["loading"]["step"] is None
    assert not opened(loading).table.column("step").size


def test_a_run_brings_its_tags_its_notes_and_the_last_line_of_a_failure(make_run):
    folder = make_run("run", run_lines(), "run: {steps: 50}\nlog: {group: sweep, tags: [lr]}\n")
    (folder / "notes.md").write_text("it diverged\n")
    (folder / "console.log").write_bytes(b"x\n" * 2**17 + b"step 40\nOSError: no space\n\n")
    (folder / ".lock").write_text("")
    run = opened(folder)
    outline = run.outline()
    assert (outline["tags"], outline["notes"], outline["last"]) == (
        ["sweep", "lr"], "it diverged", "OSError: no space",
    )  # fmt: skip
    assert run.console()[-2:] == ["step 40", "OSError: no space"] and len(run.console()) == 399
    (folder / "config.yaml").write_text("run: {steps: 40}\n")
    assert WatchedRun("run", folder).outline()["last"] == "", "it has ended well"
