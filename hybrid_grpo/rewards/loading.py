"""From `rewards` of the configuration to functions that can be called, refusing early what could only fail later."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from hybrid_grpo.config import RewardConfig, ScoringConfig, reward_name
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed import local_ranks
from hybrid_grpo.rewards.builtin import BUILTINS
from hybrid_grpo.rewards.functions import Interface, load_function
from hybrid_grpo.rewards.models.reward import RewardModel, held
from hybrid_grpo.rewards.workers.pool import Caller, CollectiveCaller, InlineCaller, Pool


@dataclass(frozen=True)
class Reward:
    """A reward function as the rank knows it."""

    name: str
    """Name in the metrics."""
    weight: float
    kwargs: frozenset[str]
    """Names of its fixed arguments."""
    interface: Interface
    caller: Caller
    """How it is called."""
    model: RewardModel | None = None
    """That the rank holds for it."""

    @property
    def together(self) -> bool:
        """Whether all ranks have to call it at the same time, with all of their completions."""
        return self.model is not None and self.model.sharded


def load_rewards(configs: Sequence[RewardConfig], scoring: ScoringConfig | None = None) -> list[Reward]:
    """Find the function of every entry, and check its `kwargs` against its signature.

    Functions that are isolated are imported in another process, and only there.

    Raises:
        UserError: an entry names nothing that can be imported and called, or its `kwargs` do not fit.
    """
    scoring = scoring or ScoringConfig()
    entries = [(f"rewards[{index}]", config) for index, config in enumerate(configs)]
    isolated = [(entry, config) for entry, config in entries if _isolated(config, entry)]
    pool = Pool(isolated, scoring.workers or _workers(), int(scoring.memory_gb * 2**30))
    order = {entry: index for index, (entry, _) in enumerate(isolated)}
    rewards = []
    for entry, config in entries:
        caller: Caller
        model = None
        if entry in order:
            interface = pool.interfaces[order[entry]]
            caller = pool.isolated(order[entry], config.timeout_s)
        else:
            function = load_function(config, entry)
            interface, called = function.interface, _called(config)
            model = held(config.kwargs) if called == "thread" else None
            if called == "inline":
                # It looks at each row by itself, so that the number of rows of a call is only a matter of speed.
                interface, caller = replace(interface, batch_size="group"), InlineCaller(function)
            elif model is not None and model.sharded:
                caller = CollectiveCaller(model.reply)
            else:
                caller = pool.threaded(function, config.timeout_s, _enter_gpu())
        name, kwargs = reward_name(config), frozenset(config.kwargs)
        rewards.append(Reward(name, config.weight, kwargs, interface, caller, model))
    return rewards


def _called(config: RewardConfig) -> str | None:
    """Where a built-in is called; None for the user's own functions."""
    return BUILTINS[config.function].called if config.function in BUILTINS else None


def _isolated(config: RewardConfig, entry: str) -> bool:
    called = _called(config)
    if config.isolation == "auto":
        return called in (None, "process")
    if config.isolation == "process" and called == "thread" and config.kwargs.get("device") != "cpu":
        raise UserError(
            f"{entry}.isolation process: processes that call {config.function} cannot share a GPU: set"
            f" {entry}.kwargs device to cpu, or isolation to none"
        )
    return config.isolation == "process"


def _workers() -> int:
    """One for each core of this rank, 2 to 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(2, cores // local_ranks()))


def _enter_gpu() -> Callable[[], None]:
    """Makes the GPU that is current here that of another thread: a new one would take the first, on every rank."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())
