"""Sources that settings name: files and folders on this machine, or names on the hub."""

import os
import re
from glob import glob
from pathlib import Path
from typing import Any

from hybrid_grpo.config.adapters import is_adapter
from hybrid_grpo.config.errors import refuse


def looks_like_path(name: str) -> bool:
    """Whether a name is a path: it exists, ends like a data file, or cannot be a hub name (`name` or `owner/name`)."""
    may_be_hubs = re.fullmatch(r"[\w\-][\w.\-]*(/[\w.\-]+)?", name) is not None
    return os.path.exists(name) or not may_be_hubs or bool(re.search(r"\.(jsonl?|parquet|[ct]sv|txt|yaml)$", name))


def matching_files(name: str) -> list[str]:
    """Return the file of this name or, of a pattern such as `data/*.jsonl`, the files, sorted; none for a folder."""
    return sorted(filter(os.path.isfile, [name] if os.path.exists(name) else glob(name, recursive=True)))


def check_source(name: str, source: Any) -> None:
    """Refuse a file or folder of rows that is missing or empty. Hub names and Python objects are not checked."""
    if not isinstance(source, str):
        return
    refuse(not source, f"{name} is not set: give a file of rows, a dataset folder or a hub name")
    files = matching_files(source)
    if looks_like_path(source) and not files:
        refuse(not Path(source).exists(), f"{name} {source}: there is no such file or folder")
        refuse(not Path(source).is_dir(), f"{name} {source} is neither a file nor a folder: give a file on disk")
    for file in files:
        refuse(os.path.getsize(file) == 0, f"{name} {file} is empty")


def check_model_folder(setting: str, model: str) -> None:
    """Refuse a folder that is missing or has no model. Hub names are looked up when the model is loaded."""
    if looks_like_path(model) and not model.endswith(".gguf"):
        why = "is a file: give the folder of a model, its hub name or a file of GGUF"
        refuse(Path(model).is_file(), f"{setting} {model} {why}")
        refuse(not Path(model).is_dir(), f"{setting} {model}: there is no such folder")
        refuse(
            not ((Path(model) / "config.json").is_file() or is_adapter(model)),
            f"{setting} {model} is not a model folder: it has no config.json",
        )
