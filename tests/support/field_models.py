"""Tiny models and tokenizers for tests/field, in the manner of public families; made once for each process."""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from byte_tokenizers import byte_level
from safetensors.torch import save_file
from tiny_models import build, tiny_config
from tokenizers.processors import Sequence, TemplateProcessing
from tool_tokenizers import QWEN, THINKERS

_PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BOTH = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODELS: dict[str, dict[str, Any]] = {
    "chatml": {"template": _PLAIN}, "tools": {"template": QWEN}, "thinking": {"template": THINKERS["never"]},
    "parts": {"template": _PARTS}, "both": {"template": _BOTH},
    "strict": {"template": _STRICT, "bos": True, "eos": "</s>"},
    "bos": {"template": "{{ bos_token }}" + _PLAIN, "bos": True}, "eos": {"template": _PLAIN, "adds_eos": True},
    "base": {"template": _PLAIN, "eos": "<eos>"}, "text": {"template": None, "eos": "<eos>"},
    "padded": {"template": _PLAIN, "padding": 64}, "adapter": {"template": _PLAIN},
}  # fmt: skip
"""By name: `template`; `bos` puts <s> before every text, `adds_eos` the end token after it; `eos` is the end token, by
default <|im_end|>, which `base` does not stop at; `padding` is the number of rows of the head without a token.
`adapter` is one of `chatml`."""
_SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]"]


@cache
def load_tokenizer(name: str) -> Any:
    made = MODELS[name]
    tokenizer = byte_level(["a"], merges=0)
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    tokenizer.eos_token = made.get("eos", "<|im_end|>")
    tokenizer.pad_token = "<eos>"
    if made.get("bos"):
        tokenizer.bos_token = "<s>"
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in ("<s>", tokenizer.eos_token)}
    added = f"{'<s> ' * made.get('bos', False)}$A{f' {tokenizer.eos_token}' * made.get('adds_eos', False)}"
    tokenizer.backend_tokenizer.post_processor = Sequence([TemplateProcessing(added, special_tokens=[*ids.items()])])
    tokenizer.chat_template = made["template"]
    return tokenizer


@cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="field-models-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def model_folder(name: str) -> Path:
    """The folder of a model with random weights."""
    folder, tokenizer = _folder() / name, load_tokenizer(name)
    if name == "adapter":
        folder.mkdir()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"]}
        config |= {"base_model_name_or_path": str(model_folder("chatml"))}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        layer = "base_model.model.model.layers.0.self_attn.q_proj"
        given = {f"{layer}.lora_A.weight": torch.randn(2, 16), f"{layer}.lora_B.weight": torch.randn(16, 2)}
        save_file(given, folder / "adapter_model.safetensors")
        return folder
    size = len(tokenizer) + MODELS[name].get("padding", 0)
    config = tiny_config("qwen2", 16, 1, vocab_size=size, eos_token_id=tokenizer.eos_token_id)
    build(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
