"""Where a model's files are: models of one quantized file (llama.cpp's GGUF) are dequantized once, into a folder.

The folder is in the cache, `~/.cache/hybrid_grpo` or `$HYBRID_GRPO_CACHE`, and is like any other model's: four bytes a
weight, the configuration, the tokenizer and the chat template.
"""

import fcntl
import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_grpo.config.adapters import base_of
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.model.doing import Doing
from hybrid_grpo.model.fingerprints import of_file, of_texts
from hybrid_grpo.model.kernels.build import cache
from hybrid_grpo.model.towers import outside_deepspeed


def files_of(name: str, setting: str = "policy.model") -> str:
    """Return the folder, or the hub name, that has a model's configuration, weights and tokenizer: of an adapter the
    base's, of a GGUF file the folder in the cache. Raises UserError if a GGUF file cannot be dequantized."""
    name = base_of(name, setting)
    if not name.endswith(".gguf"):
        return name
    file, start = Path(name), f"{setting} {name}"
    refuse(not file.is_file(), f"{start}: there is no such file: check the path, or give the model's hub name")
    refuse(find_spec("gguf") is None, f"{start} needs gguf: pip install 'hybrid_grpo[gguf]'")
    folder = cache() / f"{file.stem}-{of_texts([of_file(file)])[:16]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "gguf.lock").open("w") as lock:  # ranks of a machine share the folder
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                with Doing(f"dequantizing {file.name}, once"), TemporaryDirectory(dir=folder.parent) as scratch:
                    _dequantize(file, Path(scratch) / "model", start)
                    os.replace(Path(scratch) / "model", folder)
    except OSError as error:
        raise UserError(f"{start}: {error}: make room, or name another folder in HYBRID_GRPO_CACHE") from error
    return str(folder)


def _dequantize(file: Path, folder: Path, start: str) -> None:
    try:
        with outside_deepspeed():
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for files that it cannot read
        raise UserError(f"{start} cannot be read: {' '.join(str(error).split())[:300]}") from error
    # transformers calls the loaded model quantized, and saves none that is.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    # It saves on rank 0 alone, and any rank may come first.
    model.should_save_on_this_rank = lambda is_main_process: True
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
