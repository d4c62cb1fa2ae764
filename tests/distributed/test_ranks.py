"""What ranks of one machine share, and how they meet."""

import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed import ranks
from hybrid_grpo.run.local_ranks import free_port


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """A folder in the place of /dev/shm, with 100 MiB free, for two ranks."""
    monkeypatch.setattr(ranks, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(ranks.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    world = {"LOCAL_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks.os, "getuid", lambda: 7)
    return tmp_path


def test_too_little_shared_memory_is_told_before_the_ranks_crash(shared_memory):
    with pytest.raises(UserError, match=r"100 MiB free, but 2 ranks on one machine take 133: .* --shm-size=1g"):
        ranks.check_shared_memory()


def test_several_machines_one_rank_or_another_launcher_take_less(shared_memory, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks.check_shared_memory()
    monkeypatch.setenv("LOCAL_SIZE", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    ranks.check_shared_memory()
    monkeypatch.delenv("LOCAL_SIZE")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    ranks.check_shared_memory()


def test_what_this_job_has_there_already_counts_as_free_and_only_its_own_is_removed(shared_memory):
    names = ["7_127.0.0.1_29500_0", "7_127.0.0.1_29500_1", "7_127.0.0.1_29501_0", "8_127.0.0.1_29500_0"]
    for name in names:
        with (shared_memory / f"deepspeed_allreduce_buffer_{name}").open("wb") as file:
            file.truncate(20 << 20)
    ranks.check_shared_memory()
    ranks.release_shared_memory()
    left = sorted(path.name.removeprefix("deepspeed_allreduce_buffer_") for path in shared_memory.iterdir())
    assert left == sorted(names[1:]), "of rank 0, which this is"


def test_a_group_of_one_has_its_port_from_the_start():
    with mock.patch.dict(os.environ):
        store = ranks.form_group_of_one()
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    with pytest.raises(OSError, match="Address already in use"):
        socket.create_server(address)
    del store
    socket.create_server(address).close()


def test_a_rank_that_is_left_alone_says_whom_it_waits_for(monkeypatch, capfd):
    address = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "_SILENT_SECONDS", 0.1)
    with pytest.raises(UserError, match="the ranks of this run did not connect") as error, ranks.meeting():
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=1))
    facts = ", ".join(f"{name} {value}" for name, value in address.items())
    assert facts in str(error.value) and "engine.timeout_minutes" in str(error.value)
    assert f"hybrid-grpo: waiting for the other ranks ({facts})\n" in capfd.readouterr().err


def test_what_nccl_lacks_is_shown_and_not_taken_for_ranks_that_do_not_meet(shared_memory, monkeypatch):
    """In Docker without --ipc host; the line with the cause was cut off, and the port was blamed."""
    monkeypatch.setenv("RANK", "0")
    said = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-8fXk2q (size 9637888), error: No space left on device (28)"""
    with pytest.raises(UserError, match="NCCL does not start") as error, ranks.meeting():
        raise torch.distributed.DistBackendError(said)
    text = str(error.value)
    assert "No space left on device (28): " in text and "100 MiB free" in text and "docker run --ipc host" in text
    assert "MASTER_PORT that is free" not in text and "\n" not in text
    monkeypatch.setattr(ranks.shutil, "disk_usage", lambda path: SimpleNamespace(free=8 << 30))
    with pytest.raises(UserError, match=r"\): Duplicate GPU detected: NCCL_DEBUG=INFO says more$"), ranks.meeting():
        raise torch.distributed.DistBackendError("NCCL error\nLast error:\nDuplicate GPU detected")
