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


def test_what_nccl_lacks_is_shown_and_not_taken_for_ranks_that_do_not_meet(monkeypatch):
    """In Docker without --ipc host; the line with the cause was cut off, and the port was blamed."""
    monkeypatch.setattr(ranks.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
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
