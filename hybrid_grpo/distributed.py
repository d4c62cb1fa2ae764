"""Ranks, the few collectives that are not DeepSpeed's own, and the memory that DeepSpeed's take on one machine.

The collectives are the identity on one process, initialised or not.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from hybrid_grpo.config.errors import UserError

_SHARED_MEMORY = Path("/dev/shm")
_BUFFER_BYTES = 66 * 2**20 + 4096
"""Shared memory that a rank's collectives take in DeepSpeed's CPU backend."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def rank() -> int:
    """Rank of this process, 0 to world_size() - 1."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_ranks() -> int:
    """Ranks on this machine, as the launcher says it: DeepSpeed's by LOCAL_SIZE, torchrun by LOCAL_WORLD_SIZE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def check_shared_memory() -> None:
    """Whether the ranks' buffers fit: DeepSpeed would write less than it maps, and the ranks would crash.

    Raises:
        UserError: they do not fit.
    """
    # Ranks on several machines, or of another launcher, do not take any.
    if os.environ.get("LOCAL_SIZE") != os.environ["WORLD_SIZE"]:
        return
    # In this order: what another rank takes in between counts twice rather than not at all.
    free = shutil.disk_usage(_SHARED_MEMORY).free
    ours = sum(path.stat().st_size for path in _buffers("*"))
    if free + ours < (needed := local_ranks() * _BUFFER_BYTES):
        raise UserError(
            f"{_SHARED_MEMORY} has {free >> 20} MiB free, {local_ranks()} ranks on one machine take"
            f" {(needed >> 20) + 1}: make it larger (docker run --shm-size=1g), or remove what runs that are over have"
            " left there"
        )


def release_shared_memory() -> None:
    """Remove the name of this rank's buffer, once all ranks have mapped it: it would stay when they end, however they
    end, until the machine is started again."""
    barrier()
    for path in _buffers(str(rank())):
        path.unlink(missing_ok=True)


def _buffers(of_rank: str) -> list[Path]:
    place = f"{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    return list(_SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_{place}_{of_rank}"))


def all_reduce(tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Reduce `tensor` over ranks, in place, and return it. All ranks must call it with equal shapes."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=_OPS[op])
    return tensor


def gather_objects(value: Any) -> list[Any] | None:
    """The values of all ranks in rank order, on rank 0; None on the others."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()
