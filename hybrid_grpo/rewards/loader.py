"""Loads the functions of `rewards`, and refuses what cannot work."""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder

import torch

from hybrid_grpo.config import RewardConfig, ScoringConfig, reward_name
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.model.ranks import local_ranks
from hybrid_grpo.rewards.functions import BUILTINS, RewardEntry, load_function
from hybrid_grpo.rewards.models.reward_model import RewardModel, held
from hybrid_grpo.workers.calls import Interface
from hybrid_grpo.workers.pool import Caller, Pool, call_inline


@dataclass(frozen=True)
class Reward:
    """A reward function as a rank sees it; `caller` calls it."""

    name: str
    """Name in the metrics."""
    weight: float
    kwargs: frozenset[str]
    """Names of its fixed arguments."""
    interface: Interface
    caller: Caller
    model: RewardModel | None = None
    """The model that the rank holds for it."""
    sources: frozenset[str] = frozenset()
    """Sources of the prompts that it is for; empty for all."""

    def applies(self, prompt: Prompt) -> bool:
        """Whether it is called for completions of this prompt. Held-out prompts have no source."""
        return not self.sources or not prompt.source or prompt.source in self.sources


def load_rewards(configs: Sequence[RewardConfig], scoring: ScoringConfig | None = None) -> list[Reward]:
    """Load every entry of `rewards`; see `load_entries`."""
    return load_entries({f"rewards[{index}]": config for index, config in enumerate(configs)}, scoring)


def load_entries(configs: Mapping[str, RewardConfig], scoring: ScoringConfig | None = None) -> list[Reward]:
    """Load entries, given by the names of their settings; raises UserError like `functions.load_function`.

    Functions that run in worker processes are imported only there. All share the same workers.
    """
    scoring = scoring or ScoringConfig()
    entries = {entry: _by_name(config) for entry, config in configs.items()}
    isolated = [entry for entry, config in entries.items() if _isolated(config, entry)]
    loaded = [(entry, RewardEntry(entries[entry])) for entry in isolated]
    pool = Pool(loaded, scoring.workers or worker_count(), scoring)
    rewards = []
    for entry, config in entries.items():
        caller: Caller
        model = None
        if entry in isolated:
            index = isolated.index(entry)
            interface, caller = pool.interfaces[index], pool.isolated(index, config.timeout_s)
        else:
            function = load_function(config, entry)
            interface, called = function.interface, _called(config)
            model = held(config.kwargs) if called == "thread" else None
            if called == "inline":
                # It judges each row by itself, so the number of rows only affects speed.
                interface, caller = replace(interface, batch_size="group"), partial(call_inline, function.reply)
            elif model is not None and model.sharded:
                interface, caller = replace(interface, batch_size="all"), partial(call_inline, model.reply)
            else:
                caller = pool.threaded(function, config.timeout_s, _enter_gpu())
        sources = frozenset(config.sources)
        rewards.append(
            Reward(reward_name(config), config.weight, frozenset(config.kwargs), interface, caller, model, sources)
        )
    return rewards


def _by_name(config: RewardConfig) -> RewardConfig:
    """The entry, with the function replaced by its name if another process can import it."""
    function = config.function
    if not callable(function):
        return config
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", ".")
    try:
        pickle.dumps(function)  # refuses what is not found under its name
    except Exception:
        return config
    if module in (None, "__main__") or "." in name or PathFinder.find_spec(module.partition(".")[0]) is None:
        return config
    return type(config)(**{**vars(config), "function": f"{module}:{name}"})


def _called(config: RewardConfig) -> str | None:
    """Where a built-in is called; None for a user's own function."""
    return BUILTINS[config.function].called if config.function in BUILTINS else None


def _isolated(config: RewardConfig, entry: str) -> bool:
    """Whether the function runs in worker processes."""
    called = _called(config)
    if callable(config.function):
        if config.isolation == "process":
            raise UserError(
                f"{entry}.isolation process: {reward_name(config)} cannot be imported by another process: write it"
                " into a file, or leave isolation out"
            )
        return False
    if config.isolation == "auto":
        return called in (None, "process")
    if config.isolation == "process" and called == "thread" and config.kwargs.get("device") != "cpu":
        raise UserError(
            f"{entry}.isolation process: processes that call {config.function} cannot share a GPU: set"
            f" {entry}.kwargs device to cpu, or isolation to none"
        )
    return config.isolation == "process"


def worker_count() -> int:
    """One worker per core of this rank, but 2 to 8."""
    return min(8, max(2, len(os.sched_getaffinity(0)) // local_ranks()))


def _enter_gpu() -> Callable[[], None]:
    """A function that makes a new thread use this one's GPU; otherwise the threads of all ranks would use the first."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())
