"""Takes fingerprints of everything that a run reads, to see whether a resumed run still learns from the same inputs.

Rows, models and their tokenizers decide what is learned, as settings do. Users may fix a bug in a function before a run
resumes, so changes of code are only reported. Only the file of a function is checked, not what the file imports.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from hybrid_grpo.config import ModelRunConfig, TrainConfig
from hybrid_grpo.config.fields import function_text
from hybrid_grpo.config.held_out import held_out_sets
from hybrid_grpo.config.sources import matching_files
from hybrid_grpo.model.fingerprints import of_file, of_model, of_texts
from hybrid_grpo.model.gguf import files_of
from hybrid_grpo.rewards.functions import BUILTINS

CODE, REWARDS = "code of ", "code of rewards"
"""Prefixes of the names of fingerprints: of all code, and of the code of reward functions."""
Fingerprints = Callable[[], dict[str, str]]
"""Function that returns the fingerprints of inputs, by the inputs' names in messages."""


def of_inputs(config: ModelRunConfig, tokenizer: Any, rows: Mapping[str, Iterable[Any]]) -> Fingerprints:
    """Return a function for the fingerprints of all of a run's inputs; `rows` are dataclasses or plain values."""
    found: dict[str, str] = {}

    def take() -> dict[str, str]:
        if not found:
            found.update({name: of_texts(map(_text, values)) for name, values in rows.items()})
            found["chat template"] = of_texts([_text(getattr(tokenizer, "chat_template", None))])
            found.update(_files(config))
        # Hub models have all their files only after they are loaded.
        models = {setting: of_model(files_of(name, setting)) for setting, name in _models(config).items()}
        return found | {f"{setting} {part}": print_ for setting, of in models.items() for part, print_ in of.items()}

    return take


def held_out_name(name: str, place: Any) -> str:
    """Return the name of a held-out set's rows; it depends on `place`, since rows from elsewhere are another set."""
    return f"held-out rows of {name} ({of_texts([_text(place)])[:8]})"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    """Return a row's fields except those that the run adds; of other values, the type."""
    if not is_dataclass(value):
        return type(value).__name__
    added = ("token_ids", "opening", "first_step", "pictures", "path")
    return {name: of for name, of in vars(value).items() if name not in added}


def _models(config: ModelRunConfig) -> dict[str, str]:
    models: dict[str, str | None] = {"policy.model": config.policy.model}
    for feature in config.active_features:
        models |= feature.models
    if isinstance(config, TrainConfig):
        for index, reward in enumerate(config.rewards):
            if reward.function in BUILTINS and isinstance(model := reward.kwargs.get("model"), str):
                models[f"rewards[{index}].kwargs model"] = model
    return {setting: name for setting, name in models.items() if name}


def _files(config: ModelRunConfig) -> dict[str, str]:
    if not isinstance(config, TrainConfig):
        return {}
    rewards = [reward.function for reward in config.rewards]
    rewards += [reward.function for held_out in held_out_sets(config) for reward in held_out.rewards or ()]
    rollout, objective = config.rollout, config.grpo.objective
    functions: dict[str, list[Any]] = {
        REWARDS: rewards,
        f"{CODE}rollout.tools": [tool.function for tool in rollout.tools],
        f"{CODE}rollout.environment": list(rollout.environments.values()),
        f"{CODE}rollout.agent": [rollout.agent] if rollout.agent else [],
        f"{CODE}grpo.objective": [objective] if objective else [],
        f"{CODE}features": config.features,
    }
    files = {f"{name}: {file}": file for name, of in functions.items() for file in filter(None, map(source_file, of))}
    for feature in config.active_features:
        for setting, name in feature.files.items():
            found = matching_files(name) or matching_files(f"{name}/**")
            files |= {setting if file == name else f"{setting} {file}": Path(file) for file in found}
    return {name: of_file(file) for name, file in files.items()}


def source_file(function: str | Callable[..., Any]) -> Path | None:
    """Return the file that defines a function, found without importing it; None if there is no such file."""
    if callable(function):
        try:
            path = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
        except TypeError:
            return None
        return path if path.is_file() else None
    place, _, _ = function_text(function).rpartition(":")
    if not place or place.endswith(".py"):
        return Path(place) if Path(place).is_file() else None
    spec: ModuleSpec | None = None
    find = partial(PathFinder.find_spec, path=None)
    for end in range(1, len(names := place.split(".")) + 1):
        spec = find(".".join(names[:end]))
        if spec is None:
            return None
        find = partial(PathFinder.find_spec, path=spec.submodule_search_locations)
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None
