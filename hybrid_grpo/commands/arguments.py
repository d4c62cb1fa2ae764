"""Turns what people have at hand into settings: runs, and in Python models, data sets, tables, configurations of peft.

Everything else is refused in one line, in words of Python.
"""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid_grpo.config.errors import UserError, refuse, type_of
from hybrid_grpo.config.recipes import Settings, overlay, read_recipe
from hybrid_grpo.config.types import fields_of

_AS_PYTHON = (
    (r"another --run\.name", 'another run={"name": ...}'),
    (r"--config ", "config "),
    (r"--rewards (\w+)", r'rewards=["\1"]'),
    (r"--policy\.model\b", "model"),
    (r"--(\w+)\.(\w+) (true|false)", lambda found: f'{found[1]}={{"{found[2]}": {found[3].title()}}}'),
    (r"--(\w+)\.(\w+) (auto|zero)\b", r'\1={"\2": "\3"}'),
    (r"--(\w+)\.(\w+)", r'\1={"\2": ...}'),
)
"""What the command line calls options, and how the same is written in Python."""


def is_run(name: str) -> bool:
    """Whether this is the folder of a run, which has its settings in config.yaml, as a published model has too."""
    has = [(Path(name) / file).is_file() for file in ("config.yaml", "config.json", "adapter_config.json")]
    return bool(name) and has == [True, False, False]


def options_of_run(name: str) -> list[str]:
    """Return the options that a run stands for: its settings, and its trained model. Raises UserError without one."""
    return ["--config", f"{name}/config.yaml", "--policy.model", trained_model(Path(name), name)]


def trained_model(folder: Path, start: str) -> str:
    """Return the model that a run has trained. Raises UserError, which begins with `start`, without one."""
    trained = (folder / "model" / "config.json").is_file()
    refuse(not trained, f"{start}: the run has no trained model yet: give a model, or a run that is finished")
    return str(folder / "model")


@contextmanager
def in_words_of_python() -> Iterator[None]:
    """A context in which messages of UserError name arguments of functions instead of options."""
    try:
        yield
    except UserError as error:
        message = " ".join(str(error).split())
        for option, argument in _AS_PYTHON:
            message = re.sub(option, argument, message)
        error.args = (message,)
        raise error from None


def settings_from(
    cls: Any, command: str, model: Any, data: Any, rewards: Any, config: Any, sections: Mapping[str, Any]
) -> Settings:
    """Return the settings that the arguments of the function `command` mean. Raises UserError for anything else."""
    settings: Settings = {}
    for recipe in config if isinstance(config, list | tuple) else [] if config is None else [config]:
        settings = overlay(settings, _recipe(recipe))
    for name, section in sections.items():
        settings = overlay(settings, {name: _section(cls, name, section)})
    if data is not None:
        settings = overlay(settings, {"data": _data(data, "eval_" if command == "evaluate" else "")})
    settings = {name: _as_settings(section, str(name)) for name, section in settings.items()}
    if rewards is not None:
        settings["rewards"] = _rewards(rewards)
    if model is not None:
        run = settings.get("run", {}) if command in ("train", "sft") else None
        settings = overlay(settings, _model(model, run, command))
    return settings


def _recipe(recipe: Any) -> Settings:
    if isinstance(recipe, Mapping):
        return dict(recipe)
    refuse(
        not isinstance(recipe, str | os.PathLike),
        f"config is {_kind(recipe)}: give a YAML file, a dictionary of sections, or a list of these",
    )
    return read_recipe(Path(recipe))


def _section(cls: Any, name: str, section: Any) -> Any:
    """Return the settings of a section, which must be a dictionary; also a `peft.LoraConfig` as the section `lora`."""
    if name == "rewards" or name == "features" or name not in fields_of(cls):
        return section
    if name == "lora" and type(section).__name__ == "LoraConfig" and hasattr(section, "lora_alpha"):
        return _adapters(section)
    refuse(
        not isinstance(section, Mapping),
        f"{name} is {_kind(section)}: give its settings as a dictionary, as in {name}={{...}}, or leave it out",
    )
    return dict(section)


def _adapters(peft: Any) -> Settings:
    """Return the section `lora` for a configuration of peft."""
    modules = peft.target_modules
    lacking = ("lora_dropout", "use_dora", "use_rslora", "modules_to_save", "layers_to_transform", "rank_pattern")
    different = [name for name in lacking if getattr(peft, name, None)]
    refuse(bool(different), f"lora: adapters here have no {' or '.join(different)}: leave it out of the LoraConfig")
    names = modules if isinstance(modules, str) or modules is None else sorted(modules)
    return {"rank": peft.r, "alpha": int(peft.lora_alpha), **({"target_modules": names} if names else {})}


def _data(data: Any, held_out: str) -> Settings:
    """Return the section `data`. A dictionary is the section itself, or the columns of the rows if one is `prompt`.
    `held_out` begins the names of the settings: `eval_` for held-out rows."""
    if type(data).__name__ == "DatasetDict":
        names, usual = list(data), "test" if held_out else "train"
        return {f"{held_out}path": data[usual if usual in names else names[0]] if names else []}
    if isinstance(data, Mapping) and "prompt" not in data:
        return dict(data)
    rows = _rows(data, "data")
    refuse(
        isinstance(rows, bytes) or not (isinstance(rows, str | Sequence) or hasattr(rows, "column_names")),
        f"data is {_kind(data)}: give a file, folder, hub name, list of dictionaries, DataFrame or datasets.Dataset",
    )
    return {f"{held_out}path": rows}


def _as_settings(value: Any, place: str) -> Any:
    """Return the setting or section `place` with sources as rows that can be read, and a single reward as a list."""
    name = place.rpartition(".")[2]
    if name in ("path", "eval_path"):
        return _rows(value, place)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    if name == "rewards":
        return [value] if callable(value) or isinstance(value, Mapping) else value
    if isinstance(value, Mapping):
        return {key: _as_settings(entry, f"{place}.{key}") for key, entry in value.items()}
    if isinstance(value, list):
        return [_as_settings(entry, f"{place}[{number}]") for number, entry in enumerate(value)]
    return value


def _rows(data: Any, place: str) -> Any:
    """Return a table or dictionary of columns, of the setting `place`, as a `datasets.Dataset`; others as they are."""
    kind = type(data)
    if isinstance(data, os.PathLike):
        return os.fspath(data)
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ == "DataFrame":
        return _table("from_pandas", data, place, preserve_index=False)
    if isinstance(data, Mapping) and kind.__name__ != "DatasetDict":
        return _table("from_dict", dict(data), place)
    return list(data) if isinstance(data, tuple) else data


def _table(made_by: str, data: Any, place: str, **options: Any) -> Any:
    """Return a `datasets.Dataset`, made by one of its class methods."""
    import datasets

    try:
        return getattr(datasets.Dataset, made_by)(data, **options)
    except (ValueError, TypeError, OverflowError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{place} cannot be read as columns of rows: {why}: give a list of dictionaries") from error


def _rewards(rewards: Any) -> list[Any]:
    entries = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
    for number, entry in enumerate(entries):
        place = f"rewards[{number}]" if len(entries) > 1 else "rewards"
        refuse(
            not (isinstance(entry, str | Mapping) or callable(entry)),
            f"{place} is {_kind(entry)}: give a function, a name such as exact_match, or a dictionary with function",
        )
    return entries


def _model(model: Any, run: Any, command: str) -> Settings:
    """Return the setting of a model, which for an object is where `save_model` will put it: next to the folder of the
    run, whose name is therefore set too, or, if `run` is None, a folder that is removed at the end."""
    if isinstance(model, str | os.PathLike):
        return {"policy": {"model": os.fspath(model)}}
    refuse(
        isinstance(model, type) or not (hasattr(model, "save_pretrained") and hasattr(model, "config")),
        f"model is {_kind(model)}: give a folder, a hub name, or a model of transformers",
    )
    refuse(
        os.environ.get("WORLD_SIZE", "1") != "1",
        "model is an object, which every rank would save: save it once with save_pretrained, and give the folder",
    )
    refuse(
        hasattr(model, "peft_config"),
        "model has adapters: merge them (merge_and_unload) and give the result, or use the section lora",
    )
    if isinstance(run, Mapping):
        from hybrid_grpo.run.folder import unnamed

        runs = Path(str(run.get("dir", "runs")))
        name = run.get("name") or unnamed(runs, command, run.get("resume", "never"))
        return {"policy": {"model": str(runs / f"{name}-start")}, "run": {"name": name}}
    folder = tempfile.mkdtemp(prefix="hybrid_grpo_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"policy": {"model": folder}}


def save_model(model: Any, folder: str) -> None:
    """Save a model object with its tokenizer; do nothing for a folder or a hub name. Raises UserError if the tokenizer
    is not where the model was loaded from."""
    if model is None or isinstance(model, str | os.PathLike):
        return
    from transformers import AutoTokenizer

    source = getattr(model.config, "_name_or_path", "") or getattr(model, "name_or_path", "")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source) if source else None
    except (OSError, ValueError):
        tokenizer = None
    if tokenizer is None:
        raise UserError(
            "model is an object, and its tokenizer is not where it was loaded from: save both into one folder with"
            " save_pretrained, and give the folder"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _kind(value: Any) -> str:
    """Return a value as messages show it: short values as they are, others by their type."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:40])
    if callable(value) and hasattr(value, "__name__"):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    return type_of(value)
