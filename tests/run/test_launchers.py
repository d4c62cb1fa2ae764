"""Ranks by whoever started them: the variables of srun and mpirun, and two tasks that are one run."""

import json
import os
import socket
import subprocess
from pathlib import Path

import forks
import pytest
import yaml
from launching import make_task
from paths import ROOT
from warm_python import programs

from hybrid_grpo.run.launchers import adopt_rank

SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
MPIRUN = {
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def started_by(monkeypatch):
    """The environment of a task, and nothing else about ranks."""
    for name in list(os.environ):
        if name in (*NAMES, "LOCAL_WORLD_SIZE", "LOCAL_SIZE") or name.startswith(("SLURM_", "OMPI_", "PMI_", "MPI_")):
            monkeypatch.delenv(name)
    # What adopt_rank sets is removed again.
    for name in (*NAMES, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


@pytest.mark.parametrize("variables, expected", [
    ({}, (None,) * 5),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, (None,) * 5),  # a batch script
    ({**SRUN, "SLURM_STEP_NODELIST": "gpu[08-09],x", "SLURM_JOB_ID": "41234"}, ("3", "4", "1", "gpu08", "21234")),
    ({**SRUN, "SLURM_STEP_NODELIST": "a,b", "MASTER_PORT": "5"}, ("3", "4", "1", "a", "5")),
    ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4"}, ("3", "4", "1", "127.0.0.1", "29500")),
    (MPIRUN, ("1", "2", "1", "127.0.0.1", "29500")),
    ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "n1"}, ("1", "2", "1", "n1", "29500")),
    (dict.fromkeys(NAMES, "9") | {"WORLD_SIZE": "12"} | MPIRUN, ("9", "12", "9", "9", "9")),  # torchrun under mpirun
    (dict.fromkeys((*NAMES, "LOCAL_SIZE", "DS_ACCELERATOR"), ""), (None,) * 5),
    (dict.fromkeys(NAMES, "") | MPIRUN, ("1", "2", "1", "127.0.0.1", "29500")),
])  # fmt: skip
def test_the_words_of_a_starter(started_by, variables, expected):
    """A variable that is set and empty counts as unset, as for launch.sh; it was said to describe ranks in part."""
    started_by(variables)
    adopt_rank()
    assert tuple(os.environ.get(name) for name in NAMES) == expected
    assert "" not in (os.environ.get("LOCAL_SIZE"), os.environ.get("DS_ACCELERATOR"))


def in_parallel(commands, folder: Path) -> None:
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    tasks = [
        subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    for task in tasks:
        _, said = task.communicate(timeout=300)
        assert task.returncode == 0, said[-2000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_task(tmp_path_factory.mktemp("launching"))
    recipe = {
        **{"run": {"steps": 2}, "policy": {"model": "model", "dtype": "float32"}, "data": {"path": "train.jsonl"}},
        **{"log": {"wandb": "disabled"}, "rewards": ["exact_match"]},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_tokens": 8},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "throughput/", "memory/"))} for line in lines]


@pytest.mark.ranks
def test_two_tasks_and_two_machines_are_one_run(folder, started_by):
    """Two tasks of srun, and two launchers that do not know of each other but by the hostfile."""
    started_by({})
    train = ["train", "--config", "recipe.yaml", "--run.name"]
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": str(os.getpid())}
    first, second = (
        forks.Ranks("-m", "hybrid_grpo", *train, "tasks", cwd=folder, environment={**step, **task})
        for task in [{"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    )
    with first, second:
        assert (first.wait(300), second.wait(300)) == (0, 0), second.so_far()
    (folder / "hosts").write_text("one slots=1\ntwo slots=1\n")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    launcher = [str(programs() / "deepspeed"), "--quiet", "--hostfile", "hosts", "--no_ssh"]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", port, "--no_local_rank", "--node_rank"]
    in_parallel([[*launcher, str(node), "--module", "hybrid_grpo", *train, "machines"] for node in range(2)], folder)
    assert "# ranks: 2\n" in (folder / "runs/tasks/config.yaml").read_text()
    assert len(metrics(folder, "tasks")) == 2
    assert metrics(folder, "machines") == metrics(folder, "tasks")


@pytest.mark.process
@pytest.mark.parametrize("status, restarts", [(0, "0"), (75, "0"), (75, "1"), (1, "2")])
def test_the_batch_script_starts_a_task_for_each_rank(tmp_path, started_by, status, restarts):
    """A job that was stopped is queued again, and its run then goes on."""
    started_by({})
    doubles = {
        "srun": f'echo $2\nshift 2\nfor i in 0 1; do SLURM_PROCID=$i "$@"; done\nexit {status}',
        "python": 'echo "$SLURM_PROCID $*"',
        "scontrol": 'echo "scontrol $*"',
    }
    for name, text in doubles.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SETUP_INTO_ACTIVE": "1"}
    environment |= {"SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": restarts}
    script = [ROOT / "training_scripts/slurm.sbatch", "train", "--run.name", "mine"]
    done = subprocess.run(["bash", *script], env=environment, capture_output=True, text=True)
    # srun does not take over from sbatch how many cores a task gets.
    resumes = "" if restarts == "0" else " --run.resume auto"
    started = [f"{i} -m hybrid_grpo train --run.name mine{resumes}\n" for i in range(2)]
    queued = ["scontrol requeue 41\n"] if status == 75 else []
    assert done.stdout == "".join(["--cpus-per-task=8\n", *started, *queued])
    assert done.returncode == status
