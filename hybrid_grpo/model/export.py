"""Writes a model and its tokenizer to a folder in Hugging Face format.

Of a text model without its towers, an export is the checkpoint that it is from, with the trained weights in it.
"""

import shutil
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file

from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.model.files import SAFE, header, shapes_in_files, weight_files
from hybrid_grpo.model.towers import outside_deepspeed

_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""How files end that hold weights, or say where weights are. Copies in other formats would not be the trained ones."""
_COPIED = ("*", "additional_chat_templates/*")
"""Which files belong to a checkpoint, unless they hold weights."""


class Original:
    """The checkpoint of `model`, which `loader` made, in the folder or hub repository `name`.

    Raises UserError if a trained weight could not be written back under the name that it has there.
    """

    def __init__(self, model: Any, name: str) -> None:
        self._start = f"policy.model {name}"
        self._folder = _folder(name, self._start)
        files = self._files()
        # Only reading the names of the weights shows which renamings the files need.
        with outside_deepspeed():
            config = deepcopy(model.config)
            self._like = type(model).from_pretrained(self._folder, config=config, dtype=model.dtype, device_map="meta")
        tied = self._like.all_tied_weights_keys
        own = {name: tensor for name, tensor in self._like.state_dict().items() if name not in tied}
        known = {name: shape for file in files for name, (shape, _) in header(file, self._start).items()}
        trained = revert_weight_conversion(self._like, own)
        wrong = [name for name in sorted(trained) if known.get(name) not in (None, *shapes_in_files(trained[name]))]
        absent = sorted(trained.keys() - known.keys()) + wrong
        refuse(
            bool(absent),
            f"{self._start}: {len(absent)} of its weights would get other names or shapes when they are exported,"
            f" {', '.join(absent[:3])} among them: save it again with this version of transformers (save_pretrained)",
        )

    def export(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write the checkpoint to a folder, with the weights of `state` in place of its own, in their names, dtypes and
        files. Everything else is copied. Raises UserError if the checkpoint is gone."""
        trained = revert_weight_conversion(self._like, dict(state))
        files = self._files()
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
                for name in tensors.keys() & trained.keys():
                    # transformers transposes experts when it loads them, but not back.
                    same = trained[name].shape == tensors[name].shape
                    weight = (trained[name] if same else trained[name].mT).contiguous()
                    # A copy, since tied weights share their memory.
                    tensors[name] = weight.to(tensors[name].dtype, copy=True)
                save_file(tensors, folder / file.name, metadata=opened.metadata())
        for source in (path for pattern in _COPIED for path in self._folder.glob(pattern)):
            holds_weights = source.name != SAFE[1] and source.name.endswith(_WEIGHTS)
            if source.is_file() and not holds_weights and not source.name.startswith("."):
                target = folder / source.relative_to(self._folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(source, target)

    def _files(self) -> list[Path]:
        refuse(
            not any((self._folder / file).exists() for file in SAFE),
            f"{self._start}: {self._folder} is gone or has no safetensors, of which an export exchanges some for"
            " the trained weights: put it back, or save it as safetensors (save_pretrained does)",
        )
        return list(weight_files(self._folder, self._start))


def _folder(name: str, start: str) -> Path:
    """Return the folder of a checkpoint; of one on the hub, that in the cache, where its weights are already."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, ignore_patterns=[f"*{end}" for end in _WEIGHTS]))
    except (OSError, ValueError) as error:
        raise UserError(f"{start}: its files for pictures do not load from the hub: {error}: download it") from error


def save_model(view: Any, folder: Path, config: Any, dtype: str, original: Original | None) -> None:
    """Write unsharded weights and their configuration; if they are a part of the checkpoint `original`, write that."""
    # Gathered weights are slices of one buffer, which would be written whole; tied weights stay tied.
    copies: dict[int, Tensor] = {}
    for tensor in view.state_dict().values():
        part = tensor.nbytes < tensor.untyped_storage().nbytes()
        copies.setdefault(tensor.data_ptr(), tensor.detach().to("cpu", copy=part))
    state = {name: copies[tensor.data_ptr()] for name, tensor in view.state_dict().items()}
    if original is not None:
        original.export(state, folder)
        return
    view.save_pretrained(folder, state_dict=state)
    config.dtype = getattr(torch, dtype)
    config.save_pretrained(folder)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer, then overwrite its files with the originals that it was loaded from, if they can be found.

    transformers 5 chooses the tokenizer's class by the class of the model, and that class rebuilds the tokenizer: the
    WordLevel vocabulary of a Qwen2 model would be saved as BPE.
    """
    tokenizer.save_pretrained(folder)
    names = {*tokenizer.vocab_files_names.values(), *_TOKENIZER_FILES}
    for name in sorted(names) if tokenizer.name_or_path else ():
        source = cached_file(
            tokenizer.name_or_path, name, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
        if source is not None:
            shutil.copyfile(source, folder / name)
