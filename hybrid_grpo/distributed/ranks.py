"""Ranks, and the collectives that this package adds to DeepSpeed's.

In a single process the collectives are the identity, whether or not a process group exists.
"""

import json
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid_grpo.config.errors import UserError

T = TypeVar("T")

_SHARED_MEMORY = Path("/dev/shm")
_SILENT_SECONDS = 20.0
"""A rank that has waited this long for the others prints a line."""
_LOOK_S = 0.05
"""The longest time between two looks at whether the other ranks are there."""
_SHARED_OUT = 4096
"""Pieces of work that ranks do between two exchanges of what they have, which limits the memory of an exchange."""
_NCCL_BYTES = 64 << 20
"""With less shared memory per rank, NCCL may fail: Docker's 64 MiB are too little for two ranks."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def rank() -> int:
    """Rank of this process, 0 to world_size() - 1."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_ranks() -> int:
    """Ranks on this machine: DeepSpeed's launcher sets LOCAL_SIZE, torchrun sets LOCAL_WORLD_SIZE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


def own_cores() -> int:
    """Return the number of cores that this rank is bound to, or its share of those that all ranks here can use."""
    cores = os.sched_getaffinity(0)
    return max(1, len(cores) // (local_ranks() if cores == os.sched_getaffinity(os.getppid()) else 1))


def form_group_of_one() -> dist.Store:
    """Set the environment variables of a process group with one rank, as a launcher does, and return the group's store,
    which listens on MASTER_PORT from now on: no other process can take that port before the group starts."""
    address = "127.0.0.1"
    store = dist.TCPStore(address, 0, world_size=1, is_master=True)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": address}
    os.environ["MASTER_PORT"] = str(store.port)
    return store


@contextmanager
def meeting() -> Iterator[None]:
    """A context for starting the process group. Prints a line if this rank waits long for the others, in case they were
    never started. Raises UserError if the ranks do not find each other, or NCCL does not start."""
    facts = ", ".join(f"{name} {os.environ[name]}" for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    line = f"hybrid-grpo: waiting for the other ranks ({facts})"
    notice = threading.Timer(_SILENT_SECONDS, print, [line], {"file": sys.stderr, "flush": True})
    notice.daemon = True
    if os.environ["WORLD_SIZE"] != "1":
        notice.start()
    try:
        yield
    except dist.DistBackendError as error:
        raise UserError(f"NCCL does not start ({facts}): {_cause(str(error))}") from error
    except dist.DistError as error:
        raise UserError(
            f"the ranks of this run did not connect ({facts}): {str(error).splitlines()[0]}: start all of them within"
            " engine.timeout_minutes, with the same MASTER_ADDR and a MASTER_PORT that is free"
        ) from error
    finally:
        notice.cancel()


def _cause(message: str) -> str:
    """Return NCCL's last error and a remedy, in one line."""
    first, _, last = message.partition("Last error:")
    cause = " ".join((last.strip() or first).split())
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if "/dev/shm" in cause or free < local_ranks() * _NCCL_BYTES:
        return f"{cause}: {_SHARED_MEMORY} has {free >> 20} MiB free: make it larger (docker run --ipc host)"
    return f"{cause}: NCCL_DEBUG=INFO says more"


def all_reduce(tensor: Tensor, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Reduce `tensor` over ranks, in place, and return it. Collective; shapes must be equal."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=_OPS[op])
    return tensor


def reduced(values: Tensor, device: torch.device, op: Literal["sum", "max"] = "sum") -> Tensor:
    """Return the elementwise sum or maximum over ranks, on the CPU; the collective takes place on `device`."""
    return all_reduce(values.to(device), op).cpu()


def gather_objects(value: Any) -> list[Any] | None:
    """Return the values of all ranks in rank order on rank 0, and None on the others."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def all_gather_objects(value: T, group: Any = None) -> list[T]:
    """Return the values of all ranks, or those of a `group`, in rank order, on every one of them."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def neighbors(size: int) -> Any:
    """Return the group of `size` ranks next to each other that has this rank; None if it is alone. Collective."""
    return dist.new_subgroups(size)[0] if size > 1 else None


def shared_out(work: Callable[[int], T], count: int) -> list[T]:
    """Return `work(number)` for every number below `count`, in order, of which each rank does its share. Collective.
    If any of it raises UserError, all ranks raise the one of the lowest number."""
    done: dict[int, T] = {}
    for start in range(0, count, _SHARED_OUT):
        own: dict[int, T] = {}
        error: tuple[int, UserError] | None = None
        for number in range(start + rank(), min(start + _SHARED_OUT, count), world_size()):
            try:
                own[number] = work(number)
            except UserError as found:
                error = number, found
                break
        parts = all_gather_objects((own, error))
        if errors := [error for _, error in parts if error]:
            raise min(errors, key=lambda error: error[0])[1]
        for of_rank, _ in parts:
            done |= of_rank
    return [done[number] for number in range(count)]


def exchange_objects(values: Sequence[Any], device: torch.device) -> list[Any]:
    """Send one value to each rank, in rank order, and return those that all ranks sent to this one. Collective, on
    `device`."""
    own = rank()
    sent = [b"" if to == own else pickle.dumps(value, pickle.HIGHEST_PROTOCOL) for to, value in enumerate(values)]
    sizes = torch.tensor([len(data) for data in sent], device=device)
    dist.all_to_all_single(found_sizes := torch.empty_like(sizes), sizes)
    found = torch.empty(int(found_sizes.sum()), dtype=torch.uint8, device=device)
    data = torch.frombuffer(bytearray().join(sent), dtype=torch.uint8).to(device)
    dist.all_to_all_single(found, data, found_sizes.tolist(), sizes.tolist())
    parts = found.cpu().split(found_sizes.tolist())
    return [values[own] if of == own else pickle.loads(part.numpy().data) for of, part in enumerate(parts)]


def store(name: str) -> dist.Store:
    """Return what ranks share under a name without collectives: keys and values, and counters."""
    if world_size() == 1:
        return dist.HashStore()
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def wait_for_all() -> None:
    """Return when every rank has called this as often as this one, however long that takes: a collective that waits has
    a timeout. Signals are handled meanwhile."""
    if world_size() > 1:
        calls, start = store("waits"), time.monotonic()
        own = calls.add(str(rank()), 1)
        calls.add("all", 1)
        while calls.add("all", 0) < own * world_size():
            time.sleep(min(_LOOK_S, (time.monotonic() - start) / 10))


class Board:
    """Shows every rank what each has posted last, without waiting for anyone. The ranks create it with the same name,
    and close it after a collective."""

    def __init__(self, name: str) -> None:
        self._store, self._values, self._posts = store(name), dict[int, Any](), 0

    def post(self, value: Any) -> None:
        """Replace what this rank has posted; `value` is one that JSON can hold."""
        self._store.set(str(rank()), json.dumps(value))
        self._store.add("posts", 1)

    def read(self) -> list[Any]:
        """Return what the ranks that have posted anything have posted last, in rank order."""
        if (posts := self._store.add("posts", 0)) > self._posts:
            self._posts = posts
            for other in range(world_size()):
                if self._store.check([str(other)]):
                    self._values[other] = json.loads(self._store.get(str(other)))
        return [self._values[other] for other in sorted(self._values)]

    def close(self) -> None:
        self._store.delete_key(str(rank()))


def from_first_rank(value: T) -> T:
    return all_gather_objects(value)[0]


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()
