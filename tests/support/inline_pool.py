"""Environments in the process of the test, each object in what stands for a process of its own."""

from __future__ import annotations

from typing import Any

from hybrid_grpo.distributed.workers.calls import Call
from hybrid_grpo.distributed.workers.messages import PendingCall, decode_reply, encode_reply


class InlinePool:
    """Stands for `workers.pool.Pool`: requests are answered at once, and go through what is sent between processes.

    Attributes:
        held: the leases of objects that are not released.
    """

    def __init__(self, entries: Any, scoring: Any) -> None:
        self.entries, self.held = entries, list[Lease]()
        self.interfaces = [entry.load(name).interface for name, entry in entries]

    def leases(self, timeout_s: float, most: int | None) -> InlinePool:
        return self

    def lease(self, index: int) -> Lease:
        return Lease(self, *self.entries[index])


class Lease:
    def __init__(self, pool: InlinePool, name: str, entry: Any) -> None:
        self._pool, self._entry, self._process = pool, entry, entry.load(name)
        pool.held.append(self)

    def ask(self, request: dict[str, Any], done: Any) -> None:
        call = Call({"request": [request]}, [request["do"]])
        pending = PendingCall.of(self._entry, 0, call, 60.0)
        found = decode_reply(encode_reply(0, self._process.reply(call)), {0: pending})
        assert found is not None
        done(found[1])

    def release(self) -> None:
        self.ask({"do": "close"}, lambda _: self._pool.held.remove(self))
        assert self._process._instance is None
