"""Tiny random models of the supported architectures, made on the spot."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hybrid_grpo.generation import ATTENTION

# Matrices this small are slower on many threads, and far slower when tests share the processor.
torch.set_num_threads(1)

VOCABULARY = 61
WINDOW = 6
ARCHITECTURES = ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gpt2"]


def tiny_config(architecture: str, hidden: int = 32, layers: int = 2, **changes: Any) -> PretrainedConfig:
    """Mistral's window is WINDOW, Gemma 2's (on every other layer) too; Gemma 2 has both soft caps."""
    if architecture == "gpt2":
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": 4, "n_positions": 256}
        # Dropout off, as loading a policy turns it off: scores in training mode are those of sampling.
        sizes |= {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
        return GPT2Config(**(sizes | dict.fromkeys(_GPT2_DROPOUT, 0.0) | changes))
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if architecture == "gemma2":
        sizes |= {"head_dim": hidden // 4, "query_pre_attn_scalar": hidden // 4, "sliding_window": WINDOW}
        sizes |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0}
    elif architecture == "mistral":
        sizes |= {"sliding_window": WINDOW}
    elif architecture == "qwen3":
        # Not hidden / heads, as in the released models.
        sizes |= {"head_dim": hidden // 2}
    kinds = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig}
    return (kinds | {"gemma2": Gemma2Config})[architecture](**(sizes | changes))


_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def build(config: PretrainedConfig, attention: str = "eager", seed: int = 0) -> Any:
    """A float32 model in eval mode; the same seed gives the same weights under every attention."""
    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than real ones, biases included, so that no term can be dropped without being seen. Norms of
            # either sign keep tied embeddings from making a model repeat its last token.
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 2 / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.2)
            else:
                # Gemma's norms multiply by 1 + weight.
                parameter.copy_(noise.sign() - float(config.model_type == "gemma2"))
    return model


def pair(architecture: str, **changes: Any) -> tuple[Any, Any]:
    """A model with transformers' own attention and its decoding view, of equal weights."""
    config = tiny_config(architecture, **changes)
    return build(config), build(config, ATTENTION)
