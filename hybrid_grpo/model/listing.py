"""Imported before the models of transformers, it spares the second of two readings of all their files."""

from pathlib import Path
from typing import Any

import transformers
from transformers.utils import import_utils

_MODELS = Path(transformers.__file__).parent / "models"
_list_classes = import_utils.define_import_structure


def list_classes(path: str, prefix: str | None = None) -> Any:
    """Do what transformers' function does, but for the folder of models take the list that it has made and kept."""
    if prefix is not None or Path(path) != _MODELS / "__init__.py":
        return _list_classes(path, prefix)
    return {
        backends: {name[len("models.") :]: classes for name, classes in modules.items() if name.startswith("models.")}
        for backends, modules in _list_classes(_MODELS, prefix="models").items()
    }


import_utils.define_import_structure = list_classes
