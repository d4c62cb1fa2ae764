"""What is wrong with a checkpoint is known before it is loaded, and the one before is used."""

import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch

from hybrid_grpo.distributed import tensor_files
from hybrid_grpo.records.write_failures import WriteFailed
from hybrid_grpo.run.saving.checkpoints import Checkpoints
from hybrid_grpo.run.saving.manifest import Damaged, Manifest, measure, owner

KINDS = ("policy_00001_of_00002.pt", "reference_00001_of_00002.pt", "state_00001_of_00002.pt", "manifest.json")
NEWEST, BEFORE = "step_000006", "step_000004"


def rewrite(path, content):
    """The tests' folders are links to the files of one run: those must not change."""
    path.unlink()
    path.write_bytes(content)


def truncate(path):
    rewrite(path, path.read_bytes()[:-7])


def empty(path):
    rewrite(path, b"")


def flip(at):
    def damage(path):
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 0x10
        rewrite(path, bytes(content))

    return damage


def zero_a_block(path):
    content = path.read_bytes()
    middle = len(content) // 2
    rewrite(path, content[:middle] + bytes(64) + content[middle + 64 :])


def overwrite(path):
    rewrite(path, bytes(range(256)) * 16)


def delete(path):
    path.unlink()


def swap_ranks(path):
    other = path.with_name(path.name.replace("_00001_", "_00000_"))
    ours, theirs = path.read_bytes(), other.read_bytes()
    rewrite(path, theirs)
    rewrite(other, ours)


def take_from_another_step(path):
    rewrite(path, (path.parent.parent / BEFORE / path.name).read_bytes())


DAMAGES = {
    "truncated": (truncate, "bytes, ", "is not a manifest"),
    "empty": (empty, "has 0 bytes, ", "is not a manifest"),
    "a flipped bit at the start": (flip(0.0), "its checksum differs", "is not a manifest"),
    "a flipped bit in the middle": (flip(0.5), "its checksum differs", "manifest.json is damaged"),
    "a flipped bit near the end": (flip(0.97), "its checksum differs", "manifest.json is damaged"),
    "a block of zeros": (zero_a_block, "its checksum differs", "is not a manifest"),
    "binary": (overwrite, "bytes, ", "is not a manifest"),
    "deleted": (delete, "is missing", "is missing: the checkpoint is unfinished"),
    "of another rank": (swap_ranks, "_00000_of", None),
    "of another step": (take_from_another_step, "", "manifest.json belongs to step_000004"),
}


@pytest.fixture
def checkpoints(whole_run, tmp_path):
    """The checkpoints of the run, in a folder to break."""
    shutil.copytree(whole_run.folder / "checkpoints", tmp_path / "checkpoints", copy_function=os.link)
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def found(checkpoints):
    """Step of the newest checkpoint that is whole, and what is said of newer ones."""
    checkpoint, passed_over = checkpoints.newest_whole()
    return (checkpoint.manifest.step if checkpoint else None), passed_over


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("damage", "kind"),
    # There is one manifest for all ranks, and their states are alike.
    [(damage, kind) for damage in DAMAGES for kind in KINDS if damage != "of another rank" or kind in KINDS[:2]],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(checkpoints, kind, damage):
    break_it, says, of_manifest = DAMAGES[damage]
    says = of_manifest if kind == "manifest.json" else says
    assert found(checkpoints) == (6, [])
    break_it(checkpoints.folder / NEWEST / kind)
    step, passed_over = found(checkpoints)
    assert step == 4
    (line,) = passed_over
    named = kind.replace("_00001_", "_00000_") if damage == "of another rank" else kind
    assert line.startswith(f"{NEWEST}: {named} ") and says in line and "\n" not in line


@pytest.mark.ranks
def test_what_else_is_no_whole_checkpoint(checkpoints):
    folder = checkpoints.folder
    # What older versions wrote beside them is never read.
    (folder / "latest").write_bytes(b"\x00\xff")
    for name in (NEWEST, BEFORE):
        shutil.rmtree(folder / name)
    assert found(checkpoints) == (2, [])
    # Another run's, and one under another name.
    (folder / "step_000009").mkdir()
    manifest = Manifest.read(folder / "step_000002")
    replace(manifest, run="0123456789abcdef", step=9).write(folder / "step_000009")
    shutil.copytree(folder / "step_000002", folder / "step_000008")
    step, passed_over = found(checkpoints)
    assert step == 2
    assert passed_over == [
        "step_000009: it belongs to another run",
        "step_000008: manifest.json belongs to step_000002",
    ]
    # A number that was changed by hand.
    document = json.loads((folder / "step_000002" / "manifest.json").read_text())
    document["checkpoint"]["step"] = 8
    rewrite(folder / "step_000008" / "manifest.json", json.dumps(document).encode())
    assert "step_000008: manifest.json is damaged: its checksum differs" in found(checkpoints)[1]
    for name in ("step_000002", "step_000000"):
        delete(folder / name / "reference_00000_of_00002.pt")
    assert found(checkpoints)[0] is None and len(found(checkpoints)[1]) == 4


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS[:3])
def test_code_in_a_checkpoint_is_never_run(checkpoints, kind, tmp_path):
    folder, mark = checkpoints.folder / NEWEST, tmp_path / "ran"
    (folder / kind).unlink()
    torch.save({"module": torch.zeros(1), "code": Code(mark)}, folder / kind)
    manifest = Manifest.read(folder)
    manifest.files[kind] = measure(folder / kind)
    manifest.write(folder)
    step, passed_over = found(checkpoints)
    assert step == 4
    why = f"holds {open.__module__}.open, which is code and not data: it is not loaded"
    assert passed_over == [f"{NEWEST}: {kind} {why}"]
    # Should it ever get so far: reading refuses it too.
    with pytest.raises(pickle.UnpicklingError):
        tensor_files.read(folder / kind)
    assert not mark.exists()


def test_files_are_shared_out_by_the_rank_in_their_name():
    names = ["policy_00003_of_00016.pt", "reference_00012_of_00016.pt", "manifest.json"]
    assert [owner(name) for name in names] == [3, 12, 0]


class Engine:
    """Writes one file; fails as told."""

    stage = 0
    error = None

    def save(self, folder, tag, state):
        (folder / tag / "shard.bin").write_text("whole" if self.error is None else "par")
        if self.error is not None:
            raise self.error
        self.state = state

    def load(self, folder, tag):
        assert (folder / tag / "shard.bin").read_text() == "whole"
        return {"module": None, **self.state}


def load(checkpoints, engine):
    return checkpoints.load(engine, checkpoints.newest_whole()[0])


def test_the_newest_are_kept(tmp_path):
    checkpoints, engine = Checkpoints(tmp_path / "checkpoints", keep=2), Engine()
    assert found(checkpoints) == (None, []) and checkpoints.rollbacks == 0
    for step in (5, 10, 999_990, 1_000_000):
        checkpoints.save(engine, step, {"loader": step})
        assert load(checkpoints, engine) == {"step": step, "loader": step}
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["run_id", "step_1000000", "step_999990"]
    # A run that went back leaves what came later behind, once it has a checkpoint of its own.
    checkpoints.save(engine, 12, {})
    assert checkpoints.tags() == ["step_000012"]


@pytest.mark.parametrize("content", [None, b"", b"\xff\x00", b"run"])
def test_a_run_whose_identity_is_lost_keeps_that_of_its_checkpoints(tmp_path, content):
    first, engine = Checkpoints(tmp_path / "checkpoints", keep=3), Engine()
    first.save(engine, 1, {})
    if content is None:
        delete(first.folder / "run_id")
    else:
        rewrite(first.folder / "run_id", content)
    resumed = Checkpoints(first.folder, keep=3)
    assert found(resumed) == (1, [])
    resumed.save(engine, 2, {})
    assert found(resumed) == (2, [])
    shutil.rmtree(first.folder / "step_000002")
    assert found(resumed) == (1, [])


def test_a_kill_in_a_save_leaves_the_last_whole_one_and_its_rest_is_cleared(tmp_path):
    checkpoints, engine = Checkpoints(tmp_path / "checkpoints", keep=2), Engine()
    checkpoints.save(engine, 1, {})
    engine.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(engine, 2, {})
    assert (checkpoints.folder / ".draft_step_000002" / "shard.bin").exists()
    assert found(checkpoints) == (1, []) and load(checkpoints, engine) == {"step": 1}
    engine.error = None
    checkpoints.save(engine, 2, {})
    assert found(checkpoints) == (2, [])
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["run_id", "step_000001", "step_000002"]


@pytest.mark.parametrize("error, says", [
    (OSError(28, "No space left on device"), "No space left on device"),
    (OSError(30, "Read-only file system", "/mnt/a/b.pt"), "b.pt: Read-only file system"),
    (OSError(122, "Disk quota exceeded"), "Disk quota exceeded"),
    (OSError(24, "Too many open files"), "Too many open files"),
    (RuntimeError("unexpected pos 768 vs 662"), "unexpected pos 768 vs 662"),
])  # fmt: skip
def test_a_save_that_fails_says_why_and_leaves_no_trace(tmp_path, error, says):
    checkpoints, engine = Checkpoints(tmp_path / "checkpoints", keep=1), Engine()
    checkpoints.save(engine, 1, {})
    engine.error = error
    with pytest.raises(WriteFailed) as caught:
        checkpoints.save(engine, 2, {})
    assert str(caught.value) == f"checkpoint {checkpoints.folder / 'step_000002'} could not be written: {says}"
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["run_id", "step_000001"]
    assert found(checkpoints) == (1, [])


def test_all_is_on_the_disk_before_the_checkpoint_is_visible_and_the_old_goes_last(tmp_path, monkeypatch):
    """A power cut after the rename must find the files whole: it left `latest` beside shards of 0 bytes once."""
    checkpoints, engine = Checkpoints(tmp_path / "checkpoints", keep=1), Engine()
    checkpoints.save(engine, 1, {})
    synced = []

    def sync(descriptor):
        # One that is visible only after the name of the folder is on the disk as well.
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), checkpoints.tags()))

    monkeypatch.setattr(os, "fsync", sync)
    checkpoints.save(engine, 2, {})
    draft, old, both = str(checkpoints.folder / ".draft_step_000002"), ["step_000001"], ["step_000002", "step_000001"]
    for path in (f"{draft}/shard.bin", f"{draft}/.manifest.json.draft", draft):
        assert (path, old) in synced
    assert synced[-1] == (str(checkpoints.folder), both)
    assert checkpoints.tags() == ["step_000002"]


def test_a_manifest_cannot_be_read_from_a_folder(tmp_path):
    (tmp_path / "step_000001" / "manifest.json").mkdir(parents=True)
    with pytest.raises(Damaged, match=r"^manifest.json cannot be read: Is a directory$"):
        Manifest.read(tmp_path / "step_000001")
