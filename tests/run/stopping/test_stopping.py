"""Stopping: requests that save the run, launchers and ranks that die, and what is left of processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forks
import psutil
import pytest
from paths import ROOT, SUPPORT
from workshop import Workshop

from hybrid_grpo.config import RunConfig
from hybrid_grpo.config.errors import RunInterrupted
from hybrid_grpo.config.fields import duration_seconds
from hybrid_grpo.records.json_lines import read_jsonl
from hybrid_grpo.run.local_ranks import free_port
from hybrid_grpo.run.stopping import progress as progresses
from hybrid_grpo.run.stopping import watcher
from hybrid_grpo.run.stopping.status import SharedStatus

TRAIN = ("train", "--config", "train.yaml", "--run.resume", "auto")
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    workshop = Workshop(tmp_path_factory.mktemp("stopping"))
    yield workshop
    workshop.close()


def accident(workshop, stage, step, rank, name, *arguments, world=2, **environment):
    """A run in which something happens to a rank; see accidents.py."""
    told = [str(part) for part in (SUPPORT / "accidents.py", stage, step, rank, name)]
    return forks.run(*told, *TRAIN, *arguments, world=world, cwd=workshop.folder, environment=environment)


def results(folder: Path) -> tuple[list[dict], dict[str, bytes]]:
    """Metrics that do not measure time or memory, rollouts and weights of a finished run."""
    measured = ("time/", "throughput/", "memory/")
    lines = [
        {name: value for name, value in line.items() if not name.startswith(measured)}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]
    files = [*folder.glob("rollouts/*"), folder / "model" / "model.safetensors"]
    return lines, {path.name: path.read_bytes() for path in files}


@pytest.mark.ranks
def test_a_run_stopped_again_and_again_ends_as_if_it_had_not_been(workshop):
    """One run, asked to stop in every stage and by every means, is resumed each time."""
    assert workshop.run(*TRAIN, "--run.name", "whole", ranks=2).status == 0
    requests = [
        ("evaluation", 0, 1, "SIGTERM", 0),
        ("sampling", 1, 1, "SIGTERM", 0),
        ("scoring", 2, 0, "SIGUSR1 to the watcher", 1),
        ("update", 2, 1, "SIGINT", 1),
        ("export", 4, 0, "SIGTERM", None),
    ]
    for stage, step, rank, name, saved in requests:
        done = accident(workshop, stage, step, rank, name, "--run.name", "stopped")
        folder = Path("runs/stopped")
        if saved is None:
            assert done.status == 0, done.err
        else:
            signal_name = name.split()[0]
            line = f"stopped ({signal_name}), saved after step {saved} in {folder}: continue with --run.resume"
            assert done.status == 75 and done.err.count(line) == 1 and "Traceback" not in done.err, done.err
    assert results(workshop.folder / "runs/stopped") == results(workshop.folder / "runs/whole")


@pytest.mark.ranks
def test_a_run_stops_by_itself_when_its_time_is_over(workshop):
    arguments = (*TRAIN, "--run.name", "timed", "--run.steps", "1000000", "--run.stop_after", "6s")
    done = workshop.run(*arguments)
    assert done.status == 75 and "stopped (run.stop_after has passed), saved after step" in done.err


@pytest.mark.ranks
@pytest.mark.parametrize("stage, name, status, says", [
    ("sampling", "SIGINT twice", 130, "because rank 1 has ended with status 130"),
    ("update", "SIGKILL", 137, "because rank 1 has ended with status 137"),
    ("update", "raise", 1, "RuntimeError: an accident"),
    ("update", "SIGTERM and loop", 75, "update did not end within 1 s of the request to stop"),
])  # fmt: skip
def test_a_rank_that_dies_takes_everything_with_it(workshop, stage, name, status, says):
    """Processes of its own session that a rank has started end too, and the other rank says why it ends."""
    mark = f"mark-{os.getpid()}-{name.replace(' ', '-')}"
    done = accident(workshop, stage, 1, 1, name, f"--run.name={mark}", "--run.grace_s", "1", MARK=mark)
    assert done.status == status and says in done.err, done.err
    assert "hybrid-grpo [rank 0]: ended in " in done.err
    # The other rank's traceback would say only that its connection is gone.
    assert done.err.count("Traceback") == (name == "raise")
    assert not [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or ())]


@pytest.mark.process
@pytest.mark.parametrize("name", ["deepspeed.launcher.launch", "hybrid_grpo.run.local_ranks"])
def test_a_launcher_that_is_killed_ends_the_run(tmp_path, name):
    """DeepSpeed's, whose killed part ends with status 0, and our own: their ranks would train on."""
    Workshop(tmp_path).close()
    script = f". {ROOT}/training_scripts/launch.sh; launch {' '.join(TRAIN)} --run.name run --run.steps 1000000"
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment["PYTHONPATH"] = str(ROOT)
    if name.startswith("deepspeed"):
        environment["LAUNCHER"] = f"--num_accelerators 2 --master_port {free_port()}"
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    recipe = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=environment, **pipes)
    try:
        metrics, deadline = tmp_path / "runs/run/metrics.jsonl", time.monotonic() + LIMIT_S
        while not metrics.exists() or len(metrics.read_text()) < 2000:
            assert recipe.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        family = psutil.Process(recipe.pid).children(recursive=True)
        (launcher,) = [process for process in family if name in process.cmdline()]
        launcher.kill()
        said = recipe.communicate(timeout=LIMIT_S)[1]
    finally:
        recipe.kill()
    assert recipe.returncode == 75 and "stopped (the launcher has ended), saved after step" in said
    assert not psutil.wait_procs(family, timeout=LIMIT_S)[1]


INTERRUPTED = """
import os, sys, time
from pathlib import Path

if len(sys.argv) > 3:  # in the place of `python -u -m hybrid_grpo`
    from hybrid_grpo.run.stopping.status import own_status
    from hybrid_grpo.run.stopping.watcher import watched

    def work():
        Path("ready" + os.environ["RANK"]).touch()
        while not own_status().mine.asked:
            time.sleep(0.02)
        time.sleep(2)  # saves
        return 75

    watched(work)
from hybrid_grpo.run import local_ranks

sys.executable, sys.argv[1:] = __file__, ["2", "train"]
sys.exit(local_ranks.main())
"""


@pytest.mark.process
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_an_interrupt_stops_the_ranks_of_our_launcher_once(tmp_path, send):
    """Sent to the launcher alone, SIGINT was ignored; sent to the whole group, as Ctrl-C is, it must not count as two,
    which would end the ranks without saving."""
    program = tmp_path / "program.py"
    program.write_text(f"#!{sys.executable}\n{INTERRUPTED}")
    program.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen([sys.executable, program], cwd=tmp_path, env=environment, start_new_session=True)
    deadline = time.monotonic() + LIMIT_S
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    send(launcher.pid, signal.SIGINT)
    try:
        assert launcher.wait(20) == 75
    finally:
        for process in psutil.Process(launcher.pid).children() if launcher.poll() is None else ():
            process.kill()


LAUNCHER = """
import os, signal, subprocess, sys, time
from pathlib import Path

def end(number, _):
    Path("heard").write_text(signal.Signals(number).name)
    Path(os.environ["HYBRID_GRPO_STATUS"]).write_text("75")
    os._exit(75)

below = {"deepspeed": "deepspeed.launcher.launch", "deepspeed.launcher.launch": "rank"}.get(sys.argv[1])
if below:
    subprocess.call([sys.executable, __file__, below])
    sys.exit(1)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, end)
Path("ready").touch()
time.sleep(600)
"""


@pytest.mark.process
@pytest.mark.parametrize("sent, heard", [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGUSR1"), ("SIGINT", "SIGTERM")])
def test_the_recipes_pass_signals_on_and_end_with_the_status_of_the_run(tmp_path, sent, heard):
    """With something in the launcher's place that ends with status 1 whatever its rank says."""
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    script = f". {ROOT}/training_scripts/launch.sh; stoppable {sys.executable} launcher.py deepspeed"
    # Bash cannot hear a signal that was ignored when it started.
    heeded = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    recipe = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, preexec_fn=heeded)
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / "ready").exists():
        assert recipe.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    recipe.send_signal(signal.Signals[sent])
    assert recipe.wait(LIMIT_S) == 75
    assert (tmp_path / "heard").read_text() == heard


def test_a_rank_that_dies_before_its_watcher_has_looked_twice_is_noticed():
    """It began before this one did, and both have met since."""
    shared = SharedStatus(0, 2)
    other = shared.entries[1]
    other.tick, shared.mine.started = time.monotonic(), time.monotonic()
    pid = os.fork()
    if not pid:
        shared.rank, shared.mine = 1, other
        watcher._Watcher(shared, 0, [], 0).leave(137)
    os.waitpid(pid, 0)
    assert watcher._dead_rank(shared) == (1, 137)


STARTING = """
import os, subprocess, sys, time
from hybrid_grpo.run.stopping.watcher import watched

role = sys.argv[1]
if role == "bin/deepspeed":
    subprocess.Popen([sys.executable, __file__, "deepspeed.launcher.launch"])
elif role == "deepspeed.launcher.launch":
    time.sleep(0.5)
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "CROSS_SIZE": "1"}
    rank = subprocess.Popen([sys.executable, __file__, "rank"], env=environment)
    if len(sys.argv) == 2:
        sys.exit(rank.wait())
else:
    time.sleep(0.5)
    watched(lambda: time.sleep(60) or 0)
"""


@pytest.mark.process
@pytest.mark.parametrize("killed", [["bin/deepspeed"], ["deepspeed.launcher.launch", "which ends too"]])
def test_a_launcher_that_is_killed_before_its_ranks_look_ends_them(tmp_path, killed):
    """Killed in its first seconds, it was not among the processes above a rank, which trained on."""
    program = tmp_path / "program.py"
    program.write_text(STARTING)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = subprocess.Popen([sys.executable, program, *killed], cwd=tmp_path, env=environment, **pipes)
    start = time.monotonic()
    # The output ends with the last of the processes that write to it.
    assert "stopped before there was anything to save" in started.communicate(timeout=LIMIT_S)[0]
    assert time.monotonic() - start < 50


SUSPENDED = """
import os, signal, sys, time
from hybrid_grpo.run.stopping.status import own_status
from hybrid_grpo.run.stopping.watcher import watched

def work():
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    return 3 if own_status().mine.asked else 0

watched(work)
"""


@pytest.mark.process
def test_a_run_that_is_suspended_and_continued_goes_on():
    """An interrupted `sigtimedwait` returned a signal that there is not: `-1053514816 is not a valid Signals`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    started = subprocess.Popen([sys.executable, "-c", SUSPENDED], env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)
    started.stdout.readline()
    for _ in range(2):
        for number in (signal.SIGSTOP, signal.SIGCONT):
            os.killpg(started.pid, number)
            time.sleep(0.8)
    started.communicate("go on\n", timeout=LIMIT_S)
    assert started.returncode == 0


@pytest.mark.parametrize("text, seconds", [
    *(("90m", 5400), ("11h30m", 41400), ("45s", 45), ("45", 45), ("2d", 172800)),
    *(("1-00:00:00", 86400), ("12:30:00", 45000), ("30:00", 1800)),
])  # fmt: skip
def test_times(text, seconds):
    assert duration_seconds(text) == seconds


def test_progress_stops_at_its_time_and_at_stop_points_and_without_a_run_never(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progresses.time, "monotonic", lambda: now[0])
    shared = SharedStatus()
    monkeypatch.setattr(progresses, "own_status", lambda: shared)
    monkeypatch.setattr(SharedStatus, "listen", lambda self, stops, patience: None)
    now[0] += 7200.0  # In a notebook, `run.stop_after` counted from the first run, and ended the second at once.
    progress = progresses.Progress(RunConfig(stop_after="1h", stall_minutes=2.0))
    progress.start()
    progress.expect_saving(100.0)
    assert (shared.mine.grace_s, shared.mine.stall_s) == (120.0, 120.0)
    now[0] += 3600.0
    progress.enter("scoring", 7)
    progress.check_stop()
    assert (shared.mine.step, shared.mine.beats, progress.stop_requested(), progress.stops()) == (7, 1, False, False)
    now[0] += 1.0
    progress.enter("sampling")
    assert shared.mine.step == 7, "a stage that names no step belongs to that of the one before"
    for at_stop_point in (progress.check_stop, lambda: progress.enter("update", 8)):
        with pytest.raises(RunInterrupted):
            at_stop_point()
    assert progress.stops() and progress.stop_reason() == "run.stop_after has passed"
    # What the user says is not changed by what saving is expected to take, and what was asked before is forgotten.
    progress = progresses.Progress(RunConfig(grace_s=5.0))
    progress.start()
    progress.expect_saving(100.0)
    assert (shared.mine.grace_s, shared.mine.asked, shared.mine.cause) == (5.0, 0.0, 0)
    unwatched = progresses.Progress()
    unwatched._shared.ask(signal.SIGTERM)
    unwatched.enter("update", 1)
    assert unwatched.stop_requested() and not unwatched.stops() and unwatched.stop_reason() == "SIGTERM"
    # A watched run counts its imports too.
    shared.mine.watcher, shared.mine.started = 1, now[0] - 3601
    progress = progresses.Progress(RunConfig(stop_after="1h"))
    progress.start()
    assert progress.stop_requested()


@pytest.mark.parametrize("status, lives, found", [
    (-1, True, None), (0, False, None), (7, True, (1, 7)), (-1, False, (1, 137)),
])  # fmt: skip
def test_a_rank_is_dead_that_ended_badly_or_whose_watcher_is_gone(monkeypatch, status, lives, found):
    monkeypatch.setattr(watcher, "_lives", lambda pid: lives)
    shared = SharedStatus(0, 2)
    shared.mine.started, shared.entries[1].status = 5.0, status
    assert watcher._dead_rank(shared) is None, "what it says is of an earlier run"
    shared.entries[1].tick = 6.0
    assert watcher._dead_rank(shared) == found
