"""Ranks and the few collectives that are not DeepSpeed's own.

Everything here is the identity on one process, initialised or not.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

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
