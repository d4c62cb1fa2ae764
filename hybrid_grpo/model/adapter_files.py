"""The matrices in the folder of an adapter in peft's format, and what they add to the weights of a model."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from hybrid_grpo.config.adapters import read_adapter
from hybrid_grpo.config.errors import UserError, refuse

_MATRIX = re.compile(r"base_model\.model\.(.*)\.lora_([AB])\.weight")


def matrices(folder: str, setting: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each layer by its path. Raises UserError, which begins with `setting`, if there is more."""
    file, found = Path(folder) / "adapter_model.safetensors", dict[tuple[str, str], Tensor]()
    try:
        for name, tensor in load_file(file).items():
            match = _MATRIX.fullmatch(name)
            refuse(match is None, f"{setting} {folder} has {name}, which is no matrix of LoRA: merge it with peft")
            found[match[1], match[2]] = tensor  # type: ignore[index]
        return {path: (found[path, "A"], found[path, "B"]) for path, _ in found}
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{setting} {folder}: {file.name}: {error}: save the adapter as safetensors") from None


def changes(model: Any, folder: str, setting: str) -> Iterator[tuple[Any, Tensor]]:
    """Yield each weight that an adapter changes, which may be sharded, and what the adapter adds to it, float32. Raises
    UserError if the adapter does not fit the model."""
    config, layers = read_adapter(folder, setting), dict(model.named_modules())
    for path, (down, up) in matrices(folder, setting).items():
        added = config["lora_alpha"] / config["r"] * (up.float() @ down.float())
        added = added.T.contiguous() if isinstance(layers.get(path), Conv1D) else added
        weight = getattr(layers.get(path), "weight", torch.empty(0))
        refuse(
            added.shape != getattr(weight, "ds_shape", weight.shape),
            f"{setting} {folder} does not fit its base {config['base_model_name_or_path']}, which has no such {path}:"
            " correct it in its adapter_config.json",
        )
        yield weight, added
