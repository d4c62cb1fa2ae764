"""`port`: writes our recipe from another framework's: a YAML file, a command line, a Python script or a notebook."""

import math
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml

from hybrid_grpo.commands.foreign_files import Code, formula, read_foreign
from hybrid_grpo.config.commands import SftConfig
from hybrid_grpo.config.composition import setting_names, settings_of
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.config.foreign_names import conversions, name_here, value_here
from hybrid_grpo.config.parsing import configure, leading_argument
from hybrid_grpo.config.recipes import Dumper, Settings, overlay
from hybrid_grpo.config.secrets import masked
from hybrid_grpo.config.train import TrainConfig
from hybrid_grpo.config.types import plain_types

_USAGE = "port FILE [--gpus N] > recipe.yaml"
_HELP = f"""usage: hybrid-grpo {_USAGE}

Write a recipe of hybrid_grpo from one of TRL, verl, OpenRLHF, ms-swift, Unsloth or LLaMA-Factory: a YAML file, a shell
script with the command, a Python script or a notebook. Values are converted, also batches of completions on N GPUs to
prompts; what has no counterpart stands in comments below. Nothing of the file is run."""
_CLASSES: dict[str, Any] = {"train": TrainConfig, "sft": SftConfig}
_REWARD_MODELS = ("reward_pretrain", "reward_model", "reward_model.model.path")
_REWARDS = ("reward_funcs", "reward_weights", "remote_rm_url", *_REWARD_MODELS)


def run(arguments: list[str]) -> None:
    file, options = leading_argument(arguments, _USAGE)
    gpus = options[1] if options[:1] == ["--gpus"] and len(options) == 2 else ""
    refuse(bool(file and options) and not gpus.isdecimal(), f"usage: hybrid-grpo {_USAGE}")
    print(port(Path(file), int(gpus or 0)) if file else _HELP)


def port(path: Path, gpus: int = 0) -> str:
    """Return the recipe for the file of another framework, and for `gpus` GPUs if it names none. Raises UserError."""
    framework, command, names = read_foreign(path)
    cls = _CLASSES[command]
    seen = len(str(names.pop("CUDA_VISIBLE_DEVICES", "")).strip(",").split(","))
    foreign = {**conversions()["defaults"].get(framework, {}), **names}
    found = (formula(text, foreign) for text in conversions()["formulas"]["processes"])
    gpus = gpus or next((number for number in found if type(number) is int), seen)
    settings, left = _converted(framework, foreign, cls)
    settings |= _sources(settings.pop("data.path", []))
    _compute(settings, left, {**foreign, "rows": settings.get("data.limit"), "processes": gpus}, cls)
    if command == "train":
        settings["rewards"] = _rewards(names)
    settings, refused = _accepted(settings, cls)
    notes = [f"{name} {part}: {left[name]}" for name, part in masked(names).items() if name in left]
    if "rewards.py:" in str(settings.get("rewards")):
        notes.insert(0, "rewards.py: write the reward functions into it (docs/rewards.md), or name built-in ones")
    if "data.mixture" in settings:
        notes.insert(0, "data.mixture: a step has as many rows of each file: set weights for shares by their rows")
    recipe = yaml.dump(_nested(settings), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    lines = [f"#   {' '.join(note.split())}" for note in [*refused, *notes]]
    head = f"# {framework}'s {path.name}: hybrid-grpo {command} --config FILE, on {gpus} GPU{'s' if gpus > 1 else ''}"
    return "\n".join([head, recipe, *(["# What is left of it:"] if lines else []), *lines])


def _converted(framework: str, foreign: Settings, cls: Any) -> tuple[Settings, dict[str, str]]:
    """Return our settings by dotted name, and the names that have none, each with what to do instead."""
    settings: Settings = {}
    several: Settings = {}
    left: dict[str, str] = {}
    known = setting_names(cls)
    for name, value in foreign.items():
        if value in (None, "None", "null") or name in _REWARDS:
            continue
        here = name_here(name, framework) or (name if name in known else "unknown here")
        ours, _, words = here.partition(" ")
        became = value_here(value, name, ours)
        if isinstance(became, dict) and not isinstance(value, dict):
            several |= {key: part for key, part in became.items() if key in known}
        elif words or ours not in known:
            left[name] = here
        elif ours == "data.eval_path" and isinstance(value, list) and len(value) > 1:
            left[name] = "eval.sets (several, by name)"
        elif isinstance(value, Code):
            left[name] = f"{ours}, which the script computes"
        else:
            settings[ours] = _fitting(became, _kinds(ours, cls))
    return {**settings, **several}, left


def _kinds(ours: str, cls: Any) -> list[Any]:
    section, _, key = ours.partition(".")
    return plain_types(settings_of(cls, section).get(key))


def _fitting(value: Any, kinds: list[Any]) -> Any:
    """Return the value as a list where the setting takes a list of texts, and as a single one where it takes none."""
    if any(get_origin(kind) is list and get_args(kind)[0] is not int for kind in kinds) and value != "all-linear":
        parts = value.split(",") if isinstance(value, str) else value
        return [part.strip(" ,\"'") if isinstance(part, str) else part for part in parts]
    takes_list = any(get_origin(kind) in (list, tuple) for kind in kinds)
    return value[0] if isinstance(value, list) and len(value) == 1 and not takes_list else value


def _compute(settings: Settings, left: dict[str, str], names: Settings, cls: Any) -> None:
    """Set what follows from several of their names, and explain the rest with the formula."""
    for ours, formulas in conversions()["formulas"].items():
        for text in formulas if ours in setting_names(cls) and ours not in settings else ():
            value = formula(text, {**names, **{key.rpartition(".")[2]: part for key, part in settings.items()}})
            used = [name for name in re.findall(r"[A-Za-z_][\w.]*", text) if name in left]
            if value is not None:
                settings[ours] = math.ceil(value) if int in _kinds(ours, cls) else value
                for name in used:
                    del left[name]
                break
            left.update({name: f"{left[name]} = {text}" for name in used if "=" not in left[name]})


def _sources(path: Any) -> Settings:
    """Return the settings of the data, of which there may be several. ms-swift writes the number of rows after `#`."""
    parts = [str(part).strip().partition("#") for part in (path if isinstance(path, list) else str(path).split(","))]
    sources = [{"path": name, **({"limit": int(rows)} if rows.isdecimal() else {})} for name, _, rows in parts]
    one = {f"data.{key}": value for source in sources for key, value in source.items()}
    return one if len(sources) < 2 else {"data.mixture": sources}


def _rewards(names: Settings) -> list[Any]:
    """Return the entries of `rewards`. Functions that the framework has by name are expected in rewards.py."""
    functions, weights = (names.get(name) or [] for name in _REWARDS[:2])
    functions = functions if isinstance(functions, list) else [functions]
    entries: list[Any] = [
        {"function": "reward_model", "kwargs": {"model": name}} if "/" in name else {"function": f"rewards.py:{name}"}
        for name in functions
    ]
    for entry, weight in zip(entries, weights if isinstance(weights, list) else [weights], strict=False):
        entry["weight"] = float(weight)
    url, model = names.get("remote_rm_url"), next((names[key] for key in _REWARD_MODELS if names.get(key)), None)
    if url:
        is_file = str(url).endswith(".py")
        entries.append(f"{url}:reward_func" if is_file else {"function": "remote", "kwargs": {"url": url}})
    if model:
        entries.append({"function": "reward_model", "kwargs": {"model": model}})
    file, name = (names.get(f"custom_reward_function.{key}") for key in ("path", "name"))
    return entries if entries and not file else [*entries, f"{file or 'rewards.py'}:{name or 'compute_score'}"]


def _accepted(settings: Settings, cls: Any) -> tuple[Settings, list[str]]:
    """Return the settings without those that are refused, and why these are."""
    refused: list[str] = []
    while True:
        try:
            configure(cls, _nested(settings))
            return settings, refused
        except UserError as error:
            name = next((name for name in sorted(settings, key=len)[::-1] if str(error).startswith(name)), None)
            if name is None:
                raise
            refused.append(f"{name} {settings[name]}: {error}")
            settings = {key: value for key, value in settings.items() if key != name}


def _nested(settings: Settings) -> Settings:
    nested: Settings = {}
    for name, value in settings.items():
        section, dot, key = name.partition(".")
        nested = overlay(nested, {section: {key: value} if dot else value})
    return nested
