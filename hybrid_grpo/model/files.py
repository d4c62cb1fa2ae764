"""Checks the weights in a model folder against its configuration, reading only the headers of the weight files.

What is missing or left over is found when weights load, and so is everything else about models on the hub.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.model.gguf import files_of
from hybrid_grpo.model.loading import first_line
from hybrid_grpo.model.towers import loader

_FLOATS = ("F32", "BF16", "F16", "F64")
"""Types of weights, as safetensors names them. Others hold quantized weights, and transformers would cast them."""
SAFE, PICKLED = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Names of the single file with all weights, and of the index that maps each weight to its file, for each format."""


def check_files(name: str, config: Any, *, setting: str = "policy.model", needed: bool = True) -> None:
    """Raise `UserError` if the weights in a model's folder are missing (unless they are not `needed`), damaged, or do
    not fit a causal language model of this configuration. Pickled weights are not inspected."""
    name = files_of(name, setting)
    folder, start = Path(name), f"{setting} {name}"
    if not folder.is_dir():
        return
    try:
        with torch.device("meta"):
            model = loader(config).from_config(config, trust_remote_code=False)
    except Exception as error:  # an architecture may raise anything for numbers that it cannot take
        raise UserError(f"{start}: config.json describes no model: {first_line(error)}: repair it") from error
    if not any((folder / file).exists() for file in SAFE):
        missing = needed and not any((folder / file).exists() for file in PICKLED)
        refuse(missing, f"{start} has no weights: there is neither {SAFE[0]} nor {SAFE[1]}: save them there")
        return
    shapes: dict[str, list[int]] = {}
    trained = dict(model.named_parameters())
    for file in weight_files(folder, start):
        for weight, (shape, kind) in header(file, start).items():
            refuse(
                weight in trained and kind not in _FLOATS,
                f"{start}: {weight} is stored as {kind}, from which its values would not come back: take files in one"
                f" of {', '.join(_FLOATS)}",
            )
            shapes[weight] = shape
    asked = {weight: shapes_in_files(tensor) for weight, tensor in model.state_dict(keep_vars=True).items()}
    for weight in sorted(shapes.keys() & asked.keys()):
        refuse(
            shapes[weight] not in asked[weight],
            f"{start}: {weight} has the shape {shapes[weight]} in its files, and config.json asks for"
            f" {asked[weight][0]}:"
            " take the config.json that belongs to the weights",
        )


def shapes_in_files(tensor: Tensor) -> list[list[int]]:
    """Return the shapes that a weight may have in its files: transformers transposes some experts as it loads them."""
    return [list(tensor.shape)] + ([list(tensor.mT.shape)] if tensor.dim() == 3 else [])


def weight_files(folder: Path, start: str) -> Iterator[Path]:
    """Yield the safetensors files of a folder. Raises UserError, which begins with `start`, if one is missing."""
    whole, index = (folder / file for file in SAFE)
    if whole.exists():
        yield whole
        return
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{start}: {index.name} cannot be read: {first_line(error)}: copy it again") from error
    for name in names:
        refuse(not (folder / name).exists(), f"{start}: {index.name} names {name}, which is missing: copy it as well")
        yield folder / name


def header(file: Path, start: str) -> dict[str, tuple[list[int], str]]:
    """Return the shape and the type of each weight by name, from the header of a safetensors file."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: (list(of.get_shape()), of.get_dtype()) for name, of in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{start}: {file.name} is not a safetensors file, or is cut short: {first_line(error)}: copy it again"
        ) from error
