"""The configurations of well-known models, for machines without a hub: shapes only, no weights and no tokenizer."""

import re
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

SHAPES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""Values of config.json by the name of the model, without its owner and without `-Instruct` and the like."""


def known_config(name: str) -> Any | None:
    """Return the transformers configuration of a well-known model; None if `name` is a folder or another model."""
    short = re.sub(r"-(instruct|base|chat|it|pt)\b.*$", "", name.rpartition("/")[2].lower())
    values = next((values for known, values in SHAPES.items() if known.lower() == short), None)
    if values is None or Path(name).is_dir():
        return None
    shape = {key: value for key, value in values.items() if key not in ("billions", "model_type")}
    return AutoConfig.for_model(values["model_type"], name_or_path=name, max_position_embeddings=32_768, **shape)
