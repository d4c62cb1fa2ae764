"""Whatever happens to wandb, the run continues and has one line about it, which rank 0 prints (capsys sees nothing
of other processes): its own process would write into the live line of the terminal."""

import time
from pathlib import Path

import psutil
import pytest
from run_folder import write_lines

from hybrid_grpo.config import LogConfig
from hybrid_grpo.records.trackers.process import TrackerProcess

STAND_IN = """
import os
import time
from types import SimpleNamespace


def reach(place):
    if os.environ["FAULT"] == f"{place} raises":
        raise RuntimeError(f"no {place}\\ntoday")
    if os.environ["FAULT"] == f"{place} hangs":
        time.sleep(600)
    if os.environ["FAULT"] == f"{place} dies":
        os._exit(9)


class Run:
    url, id, step = None, "id", 0

    def define_metric(self, *args, **kwargs):
        pass

    def alert(self, *args, **kwargs):
        pass

    def log_artifact(self, artifact):
        pass

    def log(self, row, step, commit):
        reach("log")

    def finish(self, exit_code):
        reach("finish")


class Table:
    def __init__(self, *args, **kwargs):
        pass


def init(**kwargs):
    reach("init")
    return Run()


def Artifact(*args, **kwargs):
    return SimpleNamespace(add_file=lambda file: None)


Histogram, Settings, teardown = Table, Table, lambda: None
reach("import")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """In the place of wandb, a package that fails as the variable FAULT says."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))


def waited_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def has_ended(process):
    return process._process.poll() is not None


OFF = "wandb is off for the rest of this run: "


@pytest.mark.process
@pytest.mark.parametrize("fault, told", [
    ("import raises", f"{OFF}RuntimeError: no import today"),
    ("init hangs", f"{OFF}starting did not end within 5 s"),
    ("log raises", f"{OFF}RuntimeError: no log today"),
    ("log hangs", f"{OFF}writing step 1 did not end within 10 s"),
    ("log dies", f"{OFF}its process ended with status 9"),
    ("finish hangs", "wandb did not finish within 4 s of the end of the run, and was killed"),
])  # fmt: skip
def test_a_tracker_that_fails_or_hangs_is_told_of_once_and_ends_alone(
    fault, told, stand_in, folder, monkeypatch, capsys
):
    monkeypatch.setenv("FAULT", fault)
    limit_s = {"init hangs": 5, "log hangs": 10}.get(fault, 300)
    process = TrackerProcess(folder, LogConfig(wandb="offline"), {}, limit_s=limit_s)
    if fault != "finish hangs":
        waited_for(lambda: has_ended(process))
    for _ in range(3):
        process.look()
    process.ask()
    process.close(4)
    assert has_ended(process)
    assert [line for line in capsys.readouterr().err.splitlines() if line] == [f"WARNING: {told}"]


@pytest.mark.process
def test_a_run_outlives_wandb_s_own_service_and_leaves_no_process(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    process = TrackerProcess(folder, LogConfig(wandb="offline"), {}, limit_s=120)
    waited_for(lambda: list((folder / "wandb").glob("latest-run/files/media/table/*")))
    family = psutil.Process(process._process.pid).children(recursive=True)
    service = [child for child in family if "wandb-core" in child.name()]
    assert {child.nice() for child in service} == {10}
    # Linux without groups of sessions has no such file; with them, only a session's own niceness counts for the ranks.
    group = Path(f"/proc/{process._process.pid}/autogroup")
    assert not group.exists() or group.read_text().endswith("nice 10\n")
    for child in service:
        child.kill()
    assert service
    write_lines(folder / "metrics.jsonl", [{"step": 3, "reward/mean": 0.75}])
    waited_for(lambda: has_ended(process))
    process.look()
    process.ask()
    process.close(60)
    assert [line.startswith(f"WARNING: {OFF}") for line in capsys.readouterr().err.splitlines()] == [True]
    assert not any(psutil.pid_exists(child.pid) and child.status() != "zombie" for child in service)
