"""Tiny sequence classifiers with a tokenizer of characters, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from char_tokenizer import IDS, char_tokenizer
from tokenizers import processors
from transformers import AutoConfig, AutoModelForSequenceClassification

# Matrices this small are slower on many threads, and far slower when tests share the processor.
torch.set_num_threads(1)

_LLAMA: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen2": _LLAMA,
    "llama": _LLAMA,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "bert": {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
}
ARCHITECTURES = list(_OWN)


def make_reward_model(
    folder: Path, architecture: str = "qwen2", *, labels: int = 1, pad: bool = True, adds: bool = False,
    **tokenizer: Any,
) -> Path:  # fmt: skip
    """A random model in `folder`, whose weights are large enough that every token shows in the score.

    Args:
        pad: whether its configuration has a token for padding.
        adds: its tokenizer puts a token before and one behind every text, as BERT's does.
        tokenizer: arguments of `char_tokenizer`.
    """
    config = AutoConfig.for_model(
        architecture, vocab_size=len(IDS), num_labels=labels, pad_token_id=IDS["<pad>"] if pad else None,
        bos_token_id=None, eos_token_id=None, **_OWN[architecture],
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    made = char_tokenizer(**tokenizer)
    if adds:
        ends = [("<bos>", IDS["<bos>"]), ("<eos>", IDS["<eos>"])]
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=ends
        )
    made.save_pretrained(folder)
    return folder
