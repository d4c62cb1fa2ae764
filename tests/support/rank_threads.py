"""Several ranks as threads of one process, for laws of formulas that add up over ranks: no process, no DeepSpeed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed
from torch import Tensor

T = TypeVar("T")
_REDUCED = {
    torch.distributed.ReduceOp.SUM: lambda tensors: tensors.sum(0),
    torch.distributed.ReduceOp.MAX: lambda tensors: tensors.amax(0),
    torch.distributed.ReduceOp.MIN: lambda tensors: tensors.amin(0),
}


def in_ranks(world: int, program: Callable[[int], T]) -> list[T]:
    """What the program returns on each rank; it is given the rank's number."""
    group = _Group(world)
    patches = [mock.patch(f"hybrid_grpo.{module}.dist", group) for module in ("distributed.ranks", "model.ulysses")]
    with patches[0], patches[1], ThreadPoolExecutor(world) as threads:
        ended = [threads.submit(group.run, rank, program) for rank in range(world)]
    # A rank that raised is the reason why the others were not answered.
    failed = [e for e in (done.exception() for done in ended) if e is not None]
    for error in sorted(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [done.result() for done in ended]


class _Group:
    """Stands for torch.distributed."""

    HashStore, PrefixStore = torch.distributed.HashStore, torch.distributed.PrefixStore

    def __init__(self, world: int) -> None:
        store = torch.distributed.HashStore()
        self.distributed_c10d = SimpleNamespace(_get_default_store=lambda: store)
        self._world, self._own = world, threading.local()
        self._barrier, self._values = threading.Barrier(world, timeout=60), [None] * world

    def run(self, rank: int, program: Callable[[int], T]) -> T:
        self._own.rank = rank
        try:
            return program(rank)
        except BaseException:
            self._barrier.abort()
            raise

    def is_initialized(self) -> bool:
        return True

    def get_rank(self) -> int:
        return int(self._own.rank)

    def get_world_size(self, group: Any = None) -> int:
        return self._world

    rank, size = get_rank, get_world_size

    def new_subgroups(self, size: int) -> tuple[_Group, list[_Group]]:
        assert size == self._world
        return self, [self]

    def all_reduce(self, tensor: Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None) -> None:
        tensor.copy_(_REDUCED[op](torch.stack(self._all(tensor.clone()))))

    def all_gather_object(self, values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = map(pickle.loads, self._all(pickle.dumps(value)))

    def gather_object(self, value: Any, values: list[Any] | None, dst: int) -> None:
        found = self._all(value)
        if values is not None:
            values[:] = found

    def all_to_all_single(
        self, found: Tensor, sent: Tensor, found_sizes: list[int] | None = None, sent_sizes: list[int] | None = None,
        group: Any = None,
    ) -> None:  # fmt: skip
        assert sent.is_contiguous() and found.is_contiguous(), "what gloo reads and writes as if it were"
        parts = self._all(sent.split(sent_sizes or 1))
        torch.cat([of_rank[self.get_rank()] for of_rank in parts], out=found)

    def barrier(self) -> None:
        self._barrier.wait()

    def _all(self, value: Any) -> list[Any]:
        self._values[self.get_rank()] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values
