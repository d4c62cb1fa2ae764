"""One rank of a run that breaks at a chosen point: `python fault_program.py COMMAND ...` is `hybrid-grpo COMMAND ...`.

The variable FAULT is JSON: `point` (a key of POINTS), `nth` (which call of it, from 1 on), `rank` (a number, or `all`),
`action` (a key of ACTIONS), and `after`, the seconds from that call to the action (default: 0). Without it nothing
breaks.
"""

import ctypes
import importlib
import json
import math
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

POINTS = {
    "start": ("hybrid_grpo.engine", "start"), "meeting": ("deepspeed", "init_distributed"),
    "sampling": ("hybrid_grpo.generation.loop", "_Loop._step"),
    "scoring": ("hybrid_grpo.rewards.scorer", "Stream.scores"), "update": ("hybrid_grpo.policy", "Policy.step"),
    "evaluation": ("hybrid_grpo.policy", "Policy.complete"), "logging": ("hybrid_grpo.records.sinks", "Log.write"),
    "saving": ("hybrid_grpo.engine", "Engine.save"),
    "copying": ("hybrid_grpo.distributed.tensor_files", "Postponed.copy"),
    "writing": ("hybrid_grpo.run.saving.writing", "_synced"),
    "a note": ("hybrid_grpo.run.saving.writing", "replace_text"),
    "the manifest": ("hybrid_grpo.run.saving.manifest", "Manifest.write"),
    "removing": ("hybrid_grpo.run.saving.checkpoints", "Checkpoints._remove"),
    "export": ("hybrid_grpo.policy", "Policy.export"), "fsync": ("os", "fsync"), "rename": ("os", "replace"),
    "rollouts": ("hybrid_grpo.records.sinks", "Log.write_rollouts"),
}  # fmt: skip
"""Where a run can break: before a call of this function of this module."""


def _forever_in_python() -> None:
    while True:
        pass


def _raise() -> None:
    raise RuntimeError("a fault that was asked for")


def _fill_disk() -> None:
    """Fill the run's disk."""
    with suppress(OSError), open(os.environ["FAULT_JUNK"], "wb", buffering=0) as junk:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while junk.write(bytes(size)):
                    pass


ACTIONS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
    "exit": lambda: os._exit(3),
    "hang in Python": _forever_in_python,
    # Without releasing the interpreter's lock, so that no Python thread runs.
    "hang in C": lambda: ctypes.PyDLL(None).sleep(100_000),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "disk full": _fill_disk,
    "SIGUSR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
}
"""What happens there; if it returns, the function itself is called."""


def arm(point: str, nth: int, rank: int | str, action: str, after: float = 0.0) -> None:
    """Break this process at the point, if it is the chosen rank."""
    if rank not in ("all", int(os.environ.get("RANK", "0"))):
        return
    module, name = POINTS[point]
    *owners, name = name.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    def broken(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            print(f"fault: {action} at {point} {nth} of rank {os.environ.get('RANK', '0')}", flush=True)
            if after:
                threading.Timer(after, ACTIONS[action]).start()
            else:
                ACTIONS[action]()
        return original(*arguments, **options)

    setattr(owner, name, broken)


def poison(what: str, step: int, rank: int) -> None:
    """Make numbers of one rank NaN at a step: the `loss`, a `gradient` or a `weight`. A `reward` is made NaN by the
    bench's own function."""
    import torch

    from hybrid_grpo import policy, trainer

    if rank != int(os.environ.get("RANK", "0")):
        return
    step_of = trainer.Trainer.step

    def counted(self: trainer.Trainer, number: int) -> None:
        global now
        now = number
        if what == "weight" and number == step:
            # A part of one tensor on this rank: its shard under ZeRO-3, else the whole copy.
            optimizer = self.policy.engine.engine.optimizer
            flat = getattr(optimizer, "fp32_partitioned_groups_flat", None)
            for group in optimizer.param_groups if flat is None else ():
                group["params"][0].data.view(-1)[0] = math.nan
            for tensor in flat or ():
                tensor.data[0] = math.nan
            for parameter in self.policy.engine.engine.module.parameters():
                getattr(parameter, "ds_tensor", parameter.data).view(-1)[0] = math.nan
                break
        step_of(self, number)

    trainer.Trainer.step = counted  # type: ignore[method-assign]
    if what in ("loss", "gradient"):
        backward = policy.engines.Engine.backward

        def spoilt(self: Any, loss: torch.Tensor) -> None:
            if now == step and what == "loss":
                loss = loss * math.nan
            if now == step and what == "gradient":
                loss.register_hook(lambda gradient: gradient * math.nan)
            backward(self, loss)

        policy.engines.Engine.backward = spoilt  # type: ignore[method-assign]


now = 0

if __name__ == "__main__":
    fault = json.loads(os.environ.get("FAULT", "null"))
    if fault and "poison" in fault:
        poison(fault["poison"], fault["step"], fault["rank"])
    elif fault:
        arm(**fault)
    from hybrid_grpo.__main__ import entry

    entry()
