"""Loads the reward functions that the setting `rewards` lists, and refuses entries that cannot work."""

import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import CodeType, FunctionType
from typing import Any

import dill
import torch

from hybrid_grpo.config import RewardConfig, ScoringConfig, reward_name
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.config.user_code import describe
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.distributed.ranks import rank
from hybrid_grpo.distributed.workers.calls import Interface, call_inline
from hybrid_grpo.distributed.workers.pool import Caller, Pool
from hybrid_grpo.rewards.functions import BUILTINS, RewardEntry, load_function
from hybrid_grpo.rewards.models.reward_model import RewardModel, held


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
    inline: bool = False
    """Whether the function is a built-in that this rank calls itself, at once."""

    def applies(self, prompt: Prompt) -> bool:
        """Whether the function is called for completions of this prompt; always true for held-out prompts."""
        return not self.sources or not prompt.source or prompt.source in self.sources


def load_rewards(configs: Sequence[RewardConfig], scoring: ScoringConfig | None = None) -> list[Reward]:
    """Load every entry of `rewards`; see `load_entries`."""
    return load_entries({f"rewards[{index}]": config for index, config in enumerate(configs)}, scoring)


def load_entries(configs: Mapping[str, RewardConfig], scoring: ScoringConfig | None = None) -> list[Reward]:
    """Load entries, whose keys are names of settings such as `rewards[0]`; raises UserError like `load_function`.
    Functions that run in worker processes are imported only there, and share the same workers."""
    scoring = scoring or ScoringConfig()
    entries = {entry: _by_name(config) for entry, config in configs.items()}
    for entry, config in entries.items():
        builtin = BUILTINS.get(config.function) if isinstance(config.function, str) else None
        if builtin is not None and builtin.needs and find_spec(builtin.needs) is None:
            raise UserError(f"{entry} {config.function} needs {builtin.needs}: pip install it, or remove the entry")
    loaded = [(entry, found) for entry, config in entries.items() if (found := _isolated(config, entry))]
    isolated = [entry for entry, _ in loaded]
    pool = Pool(loaded, scoring)
    if pool.hidden and any(_called(entries[entry]) is None for entry in isolated):
        _notice(
            f"reward functions do not see the environment variables {', '.join(pool.hidden)}, which look like secrets:"
            " list those that they need in scoring.secrets"
        )
    rewards = []
    for entry, config in entries.items():
        caller: Caller
        model, inline = None, False
        if entry in isolated:
            index = isolated.index(entry)
            interface, caller = pool.interfaces[index], pool.isolated(index, config.timeout_s)
        else:
            function = load_function(config, entry)
            interface, called = function.interface, _called(config)
            model = held(config.kwargs) if called == "thread" else None
            if inline := called == "inline":
                # It judges each row by itself, so the number of rows only affects speed.
                interface, caller = replace(interface, batch_size="group"), partial(call_inline, function.reply)
            elif model is not None and model.sharded:
                interface, caller = replace(interface, batch_size="all"), partial(call_inline, model.reply)
            else:
                # New threads would use the first GPU; -1 changes nothing.
                device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
                caller = pool.threaded(function, config.timeout_s, partial(torch.cuda.set_device, device))
        name, kwargs, sources = reward_name(config), frozenset(config.kwargs), frozenset(config.sources)
        rewards.append(Reward(name, config.weight, kwargs, interface, caller, model, sources, inline))
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


def _isolated(config: RewardConfig, entry: str) -> RewardEntry | None:
    """Return what worker processes load; None if this process calls the function, reported if it is the user's own."""
    called, function = _called(config), config.function
    if called is not None:
        if config.isolation == "process" and called == "thread" and config.kwargs.get("device") != "cpu":
            raise UserError(
                f"{entry}.isolation process: processes that call {function} cannot share a GPU: set"
                f" {entry}.kwargs device to cpu, or isolation to none"
            )
        return RewardEntry(config) if "process" in (called, config.isolation) and config.isolation != "none" else None
    why = f"{entry}.isolation is none"
    if config.isolation != "none":
        if not callable(function):
            return RewardEntry(config)
        try:
            return RewardEntry(replace(config, function=function_text(function)), _pickled(function))
        except Exception as error:
            why = f"what {reward_name(config)} refers to cannot be sent to another process: {describe(error, None)}"
        refuse(
            config.isolation == "process",
            f"{entry}.isolation process: {why}: write {function_text(function)} into a file",
        )
    _notice(
        f"{reward_name(config)} is called in a thread ({why}), where signals such as signal.alarm, by which math-verify"
        " limits its time, raise an exception, and nothing ends a call that hangs"
    )
    return None


class _Pickler(dill.Pickler):
    """Pickles functions with what they refer to, but no models, which workers would hold once more."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            raise TypeError(f"it holds a model, {type(value).__name__}")


def _pickled(function: Callable[..., Any]) -> bytes:
    buffer, theirs = io.BytesIO(), dill.detect.globalvars
    dill.detect.globalvars = _globals  # dill's own never ends where functions call each other, as in math-verify
    try:
        _Pickler(buffer, recurse=True).dump(function)
    finally:
        dill.detect.globalvars = theirs
    return buffer.getvalue()


def _globals(function: FunctionType, recurse: bool, builtin: bool) -> dict[str, Any]:
    """Return the global variables that a function itself refers to, as dill asks for them."""
    names, codes = set[str](), [function.__code__]
    for code in codes:
        names.update(code.co_names)
        codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {name: value for name, value in function.__globals__.items() if name in names}


def _notice(text: str) -> None:
    """Print a line about a reward function on rank 0."""
    if rank() == 0:
        print(f"rewards: {text}", file=sys.stderr, flush=True)
