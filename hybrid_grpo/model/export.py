"""Writes a model and its tokenizer to a folder in Hugging Face format."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file

from hybrid_grpo.model.original import Original

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def save_model(view: Any, folder: Path, config: Any, dtype: str, original: Original | None) -> None:
    """Write unsharded weights and their configuration; if the model is a part of the checkpoint `original`, write this
    checkpoint, which has its own configuration."""
    state = _untangled(view.state_dict())
    if original is not None:
        original.export(state, folder)
        return
    view.save_pretrained(folder, state_dict=state)
    config.dtype = getattr(torch, dtype)
    config.save_pretrained(folder)


def _untangled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    # Gathered weights are slices of one buffer; tied weights stay tied.
    copies: dict[int, Tensor] = {}
    return {
        name: copies.setdefault(tensor.data_ptr(), tensor.detach().to("cpu", copy=True))
        for name, tensor in state.items()
    }


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer, then overwrite its files with the originals that it was loaded from, if they can be found.

    transformers 5 chooses the tokenizer's class by the class of the model, and that class rebuilds the tokenizer: the
    WordLevel vocabulary of a Qwen2 model would be saved as BPE.
    """
    tokenizer.save_pretrained(folder)
    names = {*tokenizer.vocab_files_names.values(), *_TOKENIZER_FILES}
    for name in sorted(names) if tokenizer.name_or_path else ():
        source = cached_file(
            tokenizer.name_or_path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if source is not None:
            shutil.copyfile(source, folder / name)
