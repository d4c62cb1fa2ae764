import pytest

from hybrid_grpo.run.checkpoint import Checkpoints


class Engine:
    """Writes one file a checkpoint; may be killed while it does."""

    dies = False

    def save(self, folder, tag, state):
        (folder / tag).mkdir(parents=True)
        (folder / tag / "shard").write_text("whole" if not self.dies else "par")
        if self.dies:
            raise KeyboardInterrupt
        self.state = state

    def load(self, folder, tag):
        assert (folder / tag / "shard").read_text() == "whole"
        return {"module": None, **self.state}


def test_the_newest_are_kept(tmp_path):
    checkpoints, engine = Checkpoints(tmp_path / "checkpoints", keep=2), Engine()
    assert checkpoints.latest() is None and checkpoints.load(engine) is None
    for step in (5, 10, 999_990, 1_000_000):
        checkpoints.save(engine, step, {"loader": step})
        assert checkpoints.load(engine) == {"step": step, "loader": step}
    assert sorted(p.name for p in checkpoints.folder.iterdir()) == ["latest", "step_1000000", "step_999990"]


class Shards:
    """One number, with which a rank of its own would be written."""

    number = 0

    def save(self, folder):
        (folder / "shards").write_text(str(self.number))

    def load(self, folder):
        self.number = int((folder / "shards").read_text())


def test_shards_are_part_of_a_checkpoint_before_it_is_the_latest(tmp_path):
    checkpoints, engine, shards = Checkpoints(tmp_path / "checkpoints", keep=2), Engine(), Shards()
    shards.number = 7
    checkpoints.save(engine, 1, {}, shards)
    shards.save = lambda folder: checkpoints.folder.joinpath("nowhere", "shards").write_text("")
    with pytest.raises(FileNotFoundError):
        checkpoints.save(engine, 2, {}, shards)
    shards.number = 0
    checkpoints.load(engine, shards)
    assert checkpoints.latest() == "step_000001" and shards.number == 7


def test_a_killed_save_leaves_the_last_whole_one_and_its_rest_is_cleared(tmp_path):
    checkpoints, engine = Checkpoints(tmp_path / "checkpoints", keep=2), Engine()
    checkpoints.save(engine, 1, {})
    engine.dies = True
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(engine, 2, {})
    assert checkpoints.latest() == "step_000001" and checkpoints.load(engine) == {"step": 1}
    engine.dies = False
    checkpoints.save(engine, 2, {})
    assert checkpoints.load(engine) == {"step": 2}
