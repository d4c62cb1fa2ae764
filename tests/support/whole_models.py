"""Tiny checkpoints with towers for pictures, as their authors would publish them."""

from pathlib import Path
from typing import Any

import torch
from architecture_proof import draw
from char_tokenizer import TEMPLATE, char_tokenizer
from safetensors.torch import load_file
from tiny_architectures import tiny_architecture
from torch import Tensor
from transformers import AutoModelForImageTextToText

OTHER_FILES = {"preprocessor_config.json": '{"size": 28}', "LICENSE": "free", "chat_template.json": '{"kept": true}'}
"""Files that no text model needs, with their texts."""


def make_whole(name: str, folder: Path, dtype: torch.dtype = torch.float32, **text: Any) -> None:
    """Write a random model of a type, with changes to the configuration of its `text`, several files of weights, a
    tokenizer and `OTHER_FILES`."""
    torch.manual_seed(0)
    config = tiny_architecture(name)
    for field, value in text.items():
        setattr(config.text_config, field, value)
    model: Any = draw(AutoModelForImageTextToText.from_config(config))
    model.to(dtype).save_pretrained(folder, max_shard_size="80KB")
    char_tokenizer(TEMPLATE).save_pretrained(folder)
    for file, text in OTHER_FILES.items():
        (folder / file).write_text(text)


def tensors(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """Return the file and the value of every tensor in a folder, by name."""
    return {
        name: (file.name, tensor)
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
