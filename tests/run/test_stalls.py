"""A rank that does not go on, in whatever way, ends the run resumably, and is named."""

import forks
import pytest
from paths import SUPPORT
from workshop import Workshop

TRAIN = ("train", "--config", "train.yaml", "--run.stall_minutes", "0.1")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    workshop = Workshop(tmp_path_factory.mktemp("stalls"))
    yield workshop
    workshop.close()


@pytest.mark.ranks
@pytest.mark.parametrize("stage, rank, name, told", [
    ("sampling", 1, "SIGSTOP", "is stopped (SIGSTOP) in sampling (step 2)"),
    ("update", 0, "loop in Python", "does not go on in update (step 2)"),
    ("scoring", 1, "loop in C", "does not go on in scoring (step 2)"),
    ("old_logp", 1, "SIGSTOP of the watcher", None),
])  # fmt: skip
def test_a_rank_that_stands_still_is_named(workshop, stage, rank, name, told):
    """A rank that is stopped, Python that loops, C that holds the interpreter's lock, one stopped with its watcher."""
    arguments = [str(part) for part in (SUPPORT / "accidents.py", stage, 2, rank, name, *TRAIN)]
    done = forks.run(*arguments, "--run.name", name.replace(" ", "_"), world=2, cwd=workshop.folder)
    assert done.status == 75, done.err
    assert told is None or f"[rank {rank}]: {told}" in done.err, done.err
    assert f"[rank {1 - rank}]: waits for other ranks in " in done.err, done.err
    # The stack of the waiting rank, and that of the other one if it runs.
    assert "in all_reduce" in done.err and (" in loop\n" in done.err) is name.startswith("loop"), done.err
    assert done.err.count("no rank goes on") == 1
    assert f"no rank goes on; rank {rank} is behind, in {stage} (step 2" in done.err, done.err


@pytest.mark.ranks
def test_one_process_has_a_watcher_too(workshop):
    arguments = [str(part) for part in (SUPPORT / "accidents.py", "saving", 2, 0, "loop in Python", *TRAIN)]
    done = forks.run(*arguments, "--checkpoint.every", "2", "--run.name", "alone", cwd=workshop.folder)
    assert done.status == 75, done.err
    assert "no rank goes on; rank 0 is behind, in saving (step 2)" in done.err
