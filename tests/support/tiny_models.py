"""Tiny random models, made on the spot: of supported architectures, and of some that only `generate()` can decode."""

from copy import deepcopy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, PretrainedConfig

from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.eight_bits import unpacked
from hybrid_grpo.model.loading import dequantized

VOCABULARY = 61
WINDOW = 6
ARCHITECTURES = [
    *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma2", "gemma3_text", "gpt2"),
    *("phi3", "olmo2", "granite", "cohere2", "smollm3", "glm4", "starcoder2"),
    *("lfm2", "qwen3_next", "falcon_h1", "bamba", "jamba"),
]
"""What the decode loop runs, by transformers' `model_type`; the last five carry states."""
MORE_ATTENTION = ["gpt_oss", "granite_swa", "mimo_v2_flash", "gemma3n_text", "gemma4_text", "deepseek_v3"]
"""It also runs these: attention sinks, values of another width, layers that read the keys and values of earlier ones,
and keys and values made of what is cached."""
STATES = ["lfm2", "qwen3_next", "falcon_h1", "bamba", "jamba"]
STATEFUL = ["mamba", "falcon_mamba"]
"""Some that it refuses."""
TIED = ["gemma2", "gpt2", "cohere2", "smollm3", "starcoder2", "lfm2"]
"""Those whose output head is the embedding."""

_WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
# Of four layers the last two read the keys and values of the first two.
_SHARED = {
    **{**_WINDOWS, "layer_types": 2 * _WINDOWS["layer_types"], "num_hidden_layers": 4, "num_kv_shared_layers": 2},
    **{"head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
}
# What each has beside the sizes of all, chosen so that leaving any of it out shows.
_OWN: dict[str, dict[str, Any]] = {
    # Not hidden / heads, as in the released models.
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        **{**_WINDOWS, "head_dim": 8, "query_pre_attn_scalar": 8},
        **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0},
    },
    # Its rotary embeddings have another base in layers with windows than in those without.
    "gemma3_text": {**_WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
    "phi3": {"sliding_window": WINDOW},
    "granite": {
        **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0},
        **{"residual_multiplier": 0.7, "logits_scaling": 2.0},
    },
    "cohere2": {**_WINDOWS, "logit_scale": 0.5},
    "smollm3": {"no_rope_layers": [1, 0]},
    "glm4": {"head_dim": 16},
    "starcoder2": {"sliding_window": WINDOW},
    "gpt_oss": {
        **{**_WINDOWS, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "granite_swa": {**_WINDOWS, "attention_multiplier": 0.2},
    "mimo_v2_flash": {**_WINDOWS, **_ROUTED, "head_dim": 16, "v_head_dim": 8, "num_key_value_heads": 1},
    "gemma3n_text": {**_SHARED, "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    # Layers without windows have wider heads, fewer of them, and take their keys as values.
    "gemma4_text": {**_SHARED, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "deepseek_v3": {
        **{**_ROUTED, "n_group": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 12},
        **{"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
        **{"num_experts": 2, "num_experts_per_tok": 1},
    },
    "lfm2": {
        **{"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_ff_dim": 48},
        **{"block_auto_adjust_ff_dim": False},
    },
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16},
        **{"ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16, "head_dim": 8},
    },
    "bamba": {
        **{"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2},
        **{"mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 16},
    },
    "falcon_h1": {
        **{"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
    },
    "qwen3_next": {
        **{**_EXPERTS, "shared_expert_intermediate_size": 16, "head_dim": 8},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        **{"layer_types": ["linear_attention", "full_attention"]},
    },
}
_GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def tiny_config(architecture: str, hidden: int = 32, layers: int = 2, **changes: Any) -> PretrainedConfig:
    """Windows are WINDOW wide, on all layers or on every other one."""
    if architecture == "gpt2":
        sizes = {"n_embd": hidden, "n_layer": layers, "n_head": 4, "n_positions": 256}
        # Dropout off, as loading a policy turns it off: scores in training mode are those of sampling.
        sizes |= {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
        return GPT2Config(**(sizes | dict.fromkeys(_GPT2_DROPOUT, 0.0) | changes))
    sizes = {"vocab_size": VOCABULARY, "hidden_size": hidden, "num_hidden_layers": layers}
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    if architecture not in STATEFUL:
        sizes |= {"intermediate_size": 2 * hidden, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"max_position_embeddings": 512, "attention_dropout": 0.0}
    sizes |= dict.fromkeys(("embedding_dropout", "residual_dropout"), 0.0) if architecture == "starcoder2" else {}
    return AutoConfig.for_model(architecture, **(sizes | _OWN.get(architecture, {}) | changes))


def in_full(packed: Any) -> Any:
    """A model with the numbers of one whose weights are in four bits and eight."""
    full, of = type(packed)._from_config(dequantized(deepcopy(packed.config)), dtype=packed.dtype), packed.get_parameter
    for name, parameter in full.named_parameters():
        parameter.data.copy_(unpacked(of(name)))
    return full


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
                # The norms of Gemma 2 and 3 multiply by 1 + weight.
                parameter.copy_(noise.sign() - float(config.model_type in ("gemma2", "gemma3_text")))
    return model


def pair(architecture: str, **changes: Any) -> tuple[Any, Any]:
    """A model with transformers' own attention and its decoding view, of equal weights."""
    config = tiny_config(architecture, **changes)
    return build(config), build(config, ATTENTION)
