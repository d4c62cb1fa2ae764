"""Loads the reward functions that the setting `rewards` lists, and refuses entries that cannot work."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec

import torch

from hybrid_grpo.config import RewardConfig, ScoringConfig, reward_name
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.model.ranks import own_cores
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
    """Names of the arguments that the configuration gives the function."""
    interface: Interface
    caller: Caller
    model: RewardModel | None = None
    """The reward model that this rank holds for the function, if it needs one."""
    sources: frozenset[str] = frozenset()
    """The prompt sources for which the function is called; empty for all sources."""

    def applies(self, prompt: Prompt) -> bool:
        """Whether the function is called for completions of this prompt; always true for held-out prompts."""
        return not self.sources or not prompt.source or prompt.source in self.sources


def load_rewards(configs: Sequence[RewardConfig], scoring: ScoringConfig | None = None) -> list[Reward]:
    """Load every entry of `rewards`; see `load_entries`."""
    return load_entries({f"rewards[{index}]": config for index, config in enumerate(configs)}, scoring)


def load_entries(configs: Mapping[str, RewardConfig], scoring: ScoringConfig | None = None) -> list[Reward]:
    """Load entries, whose keys are names of settings such as `rewards[0]`; raises UserError like `load_function`.

    Functions that run in worker processes are imported only there, and share the same workers.
    """
    scoring = scoring or ScoringConfig()
    entries = {entry: _by_name(config) for entry, config in configs.items()}
    for entry, config in entries.items():
        builtin = BUILTINS.get(config.function) if isinstance(config.function, str) else None
        if builtin is not None and builtin.needs and find_spec(builtin.needs) is None:
            raise UserError(f"{entry} {config.function} needs {builtin.needs}: pip install it, or take the entry out")
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
    """Return the entry; a function that another process can import is replaced by the text `module:name`."""
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
    """Where a built-in runs, as in `Builtin.called`; None for a user's own function."""
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
    """Return the number of workers of this rank: one per available core, but at least 2 and at most 8."""
    return min(8, max(2, own_cores()))


def _enter_gpu() -> Callable[[], None]:
    """Return a function that makes a new thread use this thread's GPU; by default, threads use the first GPU."""
    if not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())
