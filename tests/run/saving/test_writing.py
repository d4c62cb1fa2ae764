"""A checkpoint that threads write while the run continues."""

import threading
import time

import pytest
import torch
from launching import make_task, ranks
from rank_threads import in_ranks

from hybrid_grpo.distributed import tensor_files
from hybrid_grpo.distributed.ranks import barrier, rank
from hybrid_grpo.records.write_failures import WriteFailed
from hybrid_grpo.run.saving import space
from hybrid_grpo.run.saving.checkpoints import Checkpoints
from hybrid_grpo.run.saving.manifest import Manifest

LAYOUTS = ("offloaded", "stage 2", "stage 1 in bfloat16", "stage 0", "adapters")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By layout: the files of a checkpoint written beside the next step, of one that was waited for, and the next."""
    folder = make_task(tmp_path_factory.mktemp("task"))
    return ranks(2, "both", folder, programs="saving_programs.py")[0]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_those_of_a_checkpoint_that_is_waited_for_to_the_byte(written, layout):
    beside, alone, later = written[layout]
    assert beside == alone and beside.keys() == later.keys()
    names = {name.partition("_000")[0] for name in beside}
    assert names == {"policy", "state"} | ({"reference"} if layout != "adapters" else set())
    # Otherwise a step that changed the tensors too early could not be seen. (Rank 1 has nothing at stage 0.)
    same = {name for name in beside if beside[name] == later[name]}
    assert same <= {"policy_00001_of_00002.pt"} if layout == "stage 0" else not same


class Engine:
    """Has one tensor, and writes it to a file of its rank."""

    stage = 3

    def __init__(self):
        self.weight = torch.zeros(4)

    def save(self, folder, tag, state):
        tensor_files.write({"weight": self.weight, **state}, folder / tag / f"shard_{rank():05d}_of_00002.pt")

    def load(self, folder, tag):
        return tensor_files.read(folder / tag / f"shard_{rank():05d}_of_00002.pt")


@pytest.fixture
def gate(monkeypatch):
    """Threads write their files once it is open."""
    gate, write_all = threading.Event(), tensor_files.Postponed.write_all

    def behind_the_gate(self):
        assert gate.wait(20)
        yield from write_all(self)

    monkeypatch.setattr(tensor_files.Postponed, "write_all", behind_the_gate)
    yield gate
    gate.set()


def test_the_run_goes_on_while_it_is_written_and_sees_it_once_all_files_are_there(tmp_path, gate):
    def program(number):
        checkpoints, engine = Checkpoints(tmp_path / "checkpoints", keep=1), Engine()
        assert checkpoints.begin(engine, 1, {}, copy=True)
        tensor_files.settle()
        engine.weight += 1
        seen = [checkpoints.is_ready("cpu"), checkpoints.tags()]
        barrier()
        gate.set()
        assert checkpoints.finish() > 0
        return [*seen, checkpoints.tags()]

    assert in_ranks(2, program) == [[False, [], ["step_000001"]]] * 2
    for number in range(2):
        path = tmp_path / "checkpoints" / "step_000001" / f"shard_{number:05d}_of_00002.pt"
        assert tensor_files.read(path)["weight"].tolist() == [0.0] * 4


def test_a_rank_that_cannot_write_fails_the_checkpoint_of_all(tmp_path, monkeypatch):
    """Rank 0 would wait for the note of rank 1 for ever."""

    def program(number):
        checkpoints, engine = Checkpoints(tmp_path / "checkpoints", keep=1), Engine()
        checkpoints.save(engine, 1, {})
        if number == 1:
            engine.weight = FullDisk()
        assert checkpoints.begin(engine, 2, {}, copy=True)
        while not checkpoints.is_ready("cpu"):
            time.sleep(0.01)
        with pytest.raises(WriteFailed) as failure:
            checkpoints.finish()
        # The next one is written as if nothing had happened.
        engine.weight = torch.ones(4)
        before = checkpoints.tags()
        checkpoints.save(engine, 3, {})
        return str(failure.value), before

    says = f"checkpoint {tmp_path}/checkpoints/step_000002 could not be written: No space left on device (rank 1)"
    assert in_ranks(2, program) == [(says, ["step_000001"])] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["run_id", "step_000003"]


class FullDisk:
    def __reduce__(self):
        raise OSError(28, "No space left on device")


def test_without_memory_for_a_copy_on_one_rank_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(space, "host_free_bytes", lambda: 10**12 if rank() == 0 else 15)
    monkeypatch.setattr(space, "local_ranks", lambda: 1)

    def program(number):
        checkpoints, engine = Checkpoints(tmp_path / "checkpoints", keep=1), Engine()
        assert not checkpoints.begin(engine, 1, {}, copy=True)
        # One that is waited for takes no copy.
        checkpoints.save(engine, 1, {})
        return checkpoints.tags()

    assert in_ranks(2, program) == [["step_000001"]] * 2


def test_what_a_run_that_ends_by_an_error_has_begun_is_finished(tmp_path, gate):
    def program(number):
        checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
        checkpoints.begin(Engine(), 1, {}, copy=True)
        gate.set()
        checkpoints.leave()

    in_ranks(2, program)
    manifest = Manifest.read(tmp_path / "checkpoints" / "step_000001")
    assert sorted(manifest.files) == ["shard_00000_of_00002.pt", "shard_00001_of_00002.pt"]


@pytest.mark.parametrize("piece", [1, 3, 10, 64])
def test_tensors_pass_through_a_buffer_in_pieces(piece):
    source, target = torch.arange(10.0).view(2, 5).t(), torch.zeros(5, 2)
    tensor_files.pass_through(torch.empty(piece), source, target)
    assert torch.equal(target, source)
