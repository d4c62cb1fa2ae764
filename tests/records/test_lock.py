import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from paths import ROOT
from workshop import Workshop

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.records import lock
from hybrid_grpo.records.lock import FolderLock

OWNER = """
import sys
from pathlib import Path
from hybrid_grpo.records.lock import FolderLock
owned = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.process
def test_the_owner_is_named_until_it_dies(tmp_path, owner):
    with pytest.raises(UserError, match=rf"under way \(process {owner.pid} on \S+ since 20\S+\): wait"):
        FolderLock(tmp_path)
    script = [sys.executable, "-m", "hybrid_grpo.records.lock", tmp_path]
    told = subprocess.run(script, capture_output=True, text=True)
    assert told.returncode == 2 and f"process {owner.pid} on" in told.stderr and told.stderr.count("\n") == 1
    owner.kill()
    owner.wait()
    FolderLock(tmp_path).release()
    assert subprocess.run(script).returncode == 0
    assert (tmp_path / ".lock").read_text() == ""


@pytest.mark.parametrize("lives", [True, False])
def test_an_owner_on_another_machine_is_known_by_its_heartbeat(tmp_path, monkeypatch, lives):
    monkeypatch.setattr(lock, "_SILENT_SECONDS", 10.0 if lives else 0.5)
    path, ended = tmp_path / ".lock", threading.Event()
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "then", "beat": 0}))

    def beat() -> None:
        while not ended.wait(0.1):
            number = json.loads(path.read_text())["beat"] + 1
            draft = path.with_name("draft")
            draft.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "then", "beat": number}))
            draft.replace(path)

    thread = threading.Thread(target=beat)
    if lives:
        thread.start()
        with pytest.raises(UserError, match="process 7 on elsewhere since then"):
            FolderLock(tmp_path)
        ended.set()
        thread.join()
    else:
        FolderLock(tmp_path).release()


def test_the_heartbeat_rises(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_BEAT_SECONDS", 0.01)
    owned, beat = FolderLock(tmp_path), 0
    # A descriptor of its own that is closed would give up the lock: read through the owner's.
    for _ in range(6000):
        beat = json.loads(os.pread(owned._file, 999, 0))["beat"]
        if beat > 2:
            break
        threading.Event().wait(0.01)
    owned.release()
    assert beat > 2


@pytest.mark.ranks
def test_a_second_run_is_refused_on_all_ranks_and_changes_nothing(tmp_path):
    workshop = Workshop(tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    held = FolderLock(folder)
    done = workshop.run("train", "--config", "train.yaml", "--run.name", "mine", ranks=2)
    held.release()
    assert done.status == 2 and "Traceback" not in done.err
    assert done.err.count(f"run.name mine: {Path('runs/mine')} belongs to a run that is under way (process ") == 1
    assert [path.name for path in folder.iterdir()] == [".lock"]
    workshop.close()


@pytest.mark.process
def test_the_quickstart_does_not_move_the_folder_of_a_running_run(tmp_path):
    folder = tmp_path / "quickstart"
    folder.mkdir()
    held = FolderLock(folder)
    environment = os.environ | {"SKIP_SETUP": "1", "RUNS": str(tmp_path)}
    quickstart = ["bash", ROOT / "training_scripts/quickstart.sh", "--policy.model", "m"]
    done = subprocess.run(quickstart, env=environment, capture_output=True, text=True)
    held.release()
    assert done.returncode == 2 and "under way" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["quickstart"]
