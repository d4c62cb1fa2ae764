"""Boards of ranks, and whom a rank blames for an exchange that failed."""

import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from rank_threads import in_ranks

from hybrid_grpo.run.stopping import progress, watcher
from hybrid_grpo.run.stopping.status import RUNNING, RankStatus, SharedStatus, shared_status


@pytest.mark.parametrize(
    "rank, world, ranks", [("0", "1", 1), ("1", "2", 2), ("2", "2", 1), ("x", "2", 1), ("0", "", 1)]
)
def test_the_board_is_of_the_ranks_that_the_environment_describes(monkeypatch, rank, world, ranks):
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "here", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    shared = shared_status()
    assert (len(shared.entries), shared.rank) == (ranks, int(rank) if ranks > 1 else 0)


def test_an_error_of_several_ranks_is_printed_by_one_and_an_error_of_rank_1_by_rank_1():
    first, second = SharedStatus(0, 2), SharedStatus(1, 2)
    second.entries, second.mine = first.entries, first.entries[1]
    for entry in first.entries:
        entry.tick = 1e12
    assert second.is_first_to_say("rank 1's own", patience_s=0.1)
    second.mine.said = 0
    assert first.is_first_to_say("everybody's", patience_s=60) and not second.is_first_to_say("everybody's", 60)
    assert second.is_first_to_say("rank 1's own", patience_s=60), "at once, before the launcher ends it"
    first.mine.tick, second.mine.started = 10.0, 12.0
    assert not second.is_first_to_say("everybody's", 3), "started late, on a busy machine"
    second.mine.started = 14.0
    assert second.is_first_to_say("everybody's", 3), "the other was of an earlier run"


@pytest.mark.parametrize("depth", [0, 20])
@pytest.mark.parametrize("file, says, blames", [
    ("lib/torch/distributed/c10d.py", "no answer", True), ("lib/torch/nn/linear.py", "no answer", False),
    ("lib/torch/nn/linear.py", "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] no answer", True),
])  # fmt: skip
def test_an_exchange_that_fails_is_blamed_on_the_rank_that_is_dead(monkeypatch, capsys, depth, file, says, blames):
    """However deep in the program it was begun; outside of the collectives' own code, a gather is waited for."""
    monkeypatch.setattr(watcher, "_dead_rank", lambda shared: (1, 137))
    inner = {}
    exec(compile(f"def fail():\n    raise RuntimeError({says!r})", file, "exec"), inner)

    def work(left: int = depth) -> int:
        return work(left - 1) if left else inner["fail"]()

    if not blames:
        with pytest.raises(RuntimeError, match="no answer"):
            watcher._outcome(work, SharedStatus())
        return
    assert watcher._outcome(work, SharedStatus()) == 137
    assert "because rank 1 has ended with status 137" in capsys.readouterr().err


def test_a_run_at_the_same_port_that_ends_this_rank_s_entry_ends_no_watcher():
    """With two runs at one port, the entry said that the rank had ended, and its watcher died of max() of nothing."""
    mine, other, older = (
        SimpleNamespace(status=status, tick=tick, started=10.0)
        for status, tick in ((1, 12.0), (RUNNING, 11.0), (RUNNING, 9.0))
    )
    watching = watcher._Watcher.__new__(watcher._Watcher)
    watching.shared, watching.mine = SimpleNamespace(rank=0, entries=[mine, other, older]), mine
    assert watching.running() == [0, 1]


def test_a_rank_that_may_be_on_another_machine_is_missed_unless_it_has_left_normally(monkeypatch):
    """NCCL noticed a machine that was gone after engine.timeout_minutes."""
    monkeypatch.setattr(progress, "local_ranks", int)
    monkeypatch.setattr(progress, "_BEAT_S", 0.01)
    monkeypatch.setattr(watcher, "_LOST_SECONDS", 0.5)
    watching, ended = watcher._Watcher(SharedStatus(), 0, [], 0), []
    monkeypatch.setattr(watching, "end", lambda *end: ended.append(end))

    def run(number: int) -> None:
        with suppress(OSError), progress.heartbeat(RankStatus() if number else watching.mine):
            deadline = time.monotonic() + (30, 0, 0.2)[number]
            while time.monotonic() < deadline and not ended:
                watching.look(time.monotonic())
                time.sleep(0.01)
            if number == 2:
                raise OSError("its machine is gone")

    in_ranks(3, run)
    assert ended == [(watcher.RESUME_STATUS, f"rank 2 has shown no sign of life for 0.5 s: {watcher._ENDED}")]
