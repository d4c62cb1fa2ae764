"""Imported before the models of transformers, it spares all but the first of three readings of their files."""

from pathlib import Path
from typing import Any

import transformers
from transformers.utils import import_utils

_MODELS = Path(transformers.__file__).parent / "models"
_list_classes = import_utils.define_import_structure


def list_classes(path: str | Path, prefix: str | None = None) -> Any:
    """Do what transformers' function does, but for the folder of models take the list that it has made and kept."""
    if Path(path) not in (_MODELS, _MODELS / "__init__.py") or prefix not in (None, "models"):
        return _list_classes(path, prefix)
    whole = _list_classes(_MODELS, prefix="models")  # in these words, by which transformers keeps it
    if prefix == "models":
        return whole
    return {
        backends: {name[len("models.") :]: classes for name, classes in modules.items() if name.startswith("models.")}
        for backends, modules in whole.items()
    }


import_utils.define_import_structure = list_classes
