"""A rank that makes no progress, in whatever way, ends the run resumably, and is named."""

import re
from concurrent.futures import ThreadPoolExecutor

import forks
import pytest
from paths import SUPPORT
from workshop import Workshop

from hybrid_grpo.model.kernels import build

TRAIN = ("train", "--config", "train.yaml", "--run.stall_minutes", "0.25")
STALLS = {
    "SIGSTOP": ("sampling", 1, "is stopped (SIGSTOP) in sampling (step 2)"),
    "loop in Python": ("update", 0, "makes no progress in update (step 2)"),
    "loop in C": ("scoring", 1, "makes no progress in scoring (step 2)"),
    "SIGSTOP of the watcher": ("old_logp", 1, None),
}
ALONE = "loop in Python, alone"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """All of them at the same time, since they mostly wait."""
    # Not in a stage that is watched: compiling takes longer than the limit.
    build.load()
    workshop = Workshop(tmp_path_factory.mktemp("stalls"))

    def stall(name, stage, rank, *options, world=2):
        accident = [str(part) for part in (SUPPORT / "accidents.py", stage, 2, rank, name.partition(",")[0])]
        run = ["--run.name", re.sub(r"\W+", "_", name), *options]
        return forks.run(*accident, *TRAIN, *run, world=world, cwd=workshop.folder)

    with ThreadPoolExecutor() as pool:
        runs = {name: pool.submit(stall, name, stage, rank) for name, (stage, rank, _) in STALLS.items()}
        runs[ALONE] = pool.submit(stall, ALONE, "saving", 0, "--checkpoint.every", "2", world=1)
    yield {name: run.result() for name, run in runs.items()}
    workshop.close()


@pytest.mark.ranks
@pytest.mark.parametrize("name", STALLS)
def test_a_rank_that_stands_still_is_named(ended, name):
    """A rank that is stopped, Python that loops, C that holds the interpreter's lock, one stopped with its watcher."""
    (stage, rank, told), done = STALLS[name], ended[name]
    assert done.status == 75, done.err
    assert told is None or f"[rank {rank}]: {told}" in done.err, done.err
    assert f"[rank {1 - rank}]: waits for other ranks in " in done.err, done.err
    # The stack of the waiting rank, and that of the other one if it runs.
    waits = "wait_for_all" if stage == "sampling" else "all_reduce"
    assert f"in {waits}" in done.err and (" in loop\n" in done.err) is name.startswith("loop"), done.err
    assert done.err.count("no rank makes progress") == 1
    assert f"no rank makes progress; rank {rank} is behind, in {stage} (step 2" in done.err, done.err


@pytest.mark.ranks
def test_one_process_has_a_watcher_too(ended):
    assert ended[ALONE].status == 75, ended[ALONE].err
    assert "no rank makes progress; rank 0 is behind, in saving (step 2)" in ended[ALONE].err
