"""Imported before the models of transformers, which would read the files of all of them a second time: half as long as
importing torch. Importing transformers has made the same list of their classes, with `models.` before each name."""

from pathlib import Path
from typing import Any

import transformers
from transformers.utils import import_utils

_MODELS = Path(transformers.__file__).parent / "models"
_list_classes = import_utils.define_import_structure


def list_classes(path: str, prefix: str | None = None) -> Any:
    """Do what transformers' `define_import_structure` does, but read no file for the folder of all models."""
    if prefix is not None or Path(path) != _MODELS / "__init__.py":
        return _list_classes(path, prefix)
    listed = _list_classes(_MODELS, prefix="models")  # kept by transformers
    return {
        backends: {name[len("models.") :]: classes for name, classes in modules.items() if name.startswith("models.")}
        for backends, modules in listed.items()
    }


import_utils.define_import_structure = list_classes
