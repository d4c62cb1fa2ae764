"""From `rewards` of the configuration to reward functions, refusing early what could only fail later.

Imports the user's code, but does not call it: scoring.py does.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hybrid_grpo.config import RewardConfig, reward_name
from hybrid_grpo.errors import UserError, did_you_mean
from hybrid_grpo.rewards.builtin import BUILTINS

INPUTS = ("prompts", "completions", "completion_ids")
"""What every reward function can ask for, beside the columns of the data set."""


@dataclass(frozen=True)
class Reward:
    """A reward function with its settings, and what its signature says."""

    name: str
    """Name in the metrics."""
    weight: float
    function: Callable[..., Any]
    kwargs: dict[str, Any]
    """Fixed keyword arguments."""
    required: frozenset[str]
    """Parameters without a default that `kwargs` does not give."""
    accepted: frozenset[str] | None
    """Parameters that can be given by name; None: any (**kwargs)."""

    def accepts(self, name: str) -> bool:
        """Whether the function can be given an argument of this name."""
        return self.accepted is None or name in self.accepted

    def __call__(self, inputs: dict[str, list[Any]]) -> Any:
        """Call the function with those of the inputs that it accepts; each call gets lists of its own."""
        return self.function(**{k: list(v) for k, v in inputs.items() if self.accepts(k)}, **self.kwargs)


def load_rewards(configs: list[RewardConfig]) -> list[Reward]:
    """Find the function of every entry and check its `kwargs` against its signature.

    Raises:
        UserError: an entry names nothing that can be imported and called, or its `kwargs` do not fit.
    """
    return [_load(config, f"rewards[{index}]") for index, config in enumerate(configs)]


def describe(error: BaseException, file: str | None) -> str:
    """Type, message and, where the error passed through `file`, its line there; all on one line."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" ({Path(file).name}:{lines[-1]})" if file and lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ") + place


def _load(config: RewardConfig, entry: str) -> Reward:
    if not math.isfinite(config.weight):
        raise UserError(f"{entry}.weight {config.weight} must be a finite number")
    function = _find(config.function, f"{entry}.function {config.function}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise UserError(
            f"{entry}.function {config.function} has no signature that Python can read: wrap it in a `def`"
        ) from None
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in variadic}
    reward = Reward(
        name=reward_name(config),
        weight=config.weight,
        function=function,
        kwargs=config.kwargs,
        required=frozenset(needed - config.kwargs.keys()),
        accepted=None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(named),
    )
    _check_kwargs(reward, named, entry)
    if config.function in BUILTINS:
        _check_builtin(reward, {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}, entry)
    return reward


def _check_kwargs(reward: Reward, named: set[str], entry: str) -> None:
    for name in reward.kwargs:
        if name in INPUTS:
            raise UserError(f"{entry}.kwargs {name}: {reward.name} is given {name} of the rollout: leave it out")
        if not reward.accepts(name):
            hint = did_you_mean(name, named - set(INPUTS))
            raise UserError(f"{entry}.kwargs {name}: {reward.name} has no such parameter: {hint}")


def _check_builtin(reward: Reward, settings: set[str], entry: str) -> None:
    """A built-in checks its settings before it looks at rows: a call with no rows checks them now."""
    for name in sorted(settings & reward.required):
        raise UserError(f"{entry}.kwargs lacks {name}, which {reward.name} needs: give kwargs: {{{name}: ...}}")
    try:
        reward({name: [] for name in reward.required})
    except Exception as error:
        raise UserError(f"{entry}.kwargs do not suit {reward.name}: {describe(error, None)}") from error


def _find(spec: str, setting: str) -> Callable[..., Any]:
    place, colon, attribute = spec.rpartition(":")
    if not colon:
        if spec not in BUILTINS:
            raise UserError(
                f"{setting} is no built-in: {did_you_mean(spec, BUILTINS)}; one of your own is given as"
                " path/to/file.py:function or package.module:function"
            )
        return BUILTINS[spec]
    module = _import(place, setting)
    function = getattr(module, attribute, None)
    if not callable(function):
        what = "is not a function" if hasattr(module, attribute) else "does not exist"
        name = attribute or "the name behind the colon"
        raise UserError(f"{setting}: {name} {what} in {place}: {did_you_mean(attribute, _functions(module))}")
    return function


def _functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _import(place: str, setting: str) -> ModuleType:
    is_file = place.endswith(".py") or "/" in place
    path = Path(place).expanduser().resolve()
    if is_file and not path.is_file():
        raise UserError(f"{setting}: there is no file {path}")
    try:
        if is_file:
            return _import_file(path)
        with _first_on_path(Path.cwd()):  # as `python -m` has it, for a console script
            return importlib.import_module(place)
    except Exception as error:
        absent = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if not is_file and absent and f"{place}.".startswith(f"{absent}."):
            raise UserError(
                f"{setting}: there is no module {absent}: install it, or give the function as path/to/file.py:function"
            ) from error
        raise UserError(f"{setting}: importing {place} raised {describe(error, str(path))}") from error


def _import_file(path: Path) -> ModuleType:
    """The module of a file, imported once; its name depends on its path only, so that what it defines pickles."""
    name = f"hybrid_grpo_reward_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _first_on_path(path.parent):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with suppress(ValueError):  # the imported code may have rearranged the path
            sys.path.remove(str(folder))
