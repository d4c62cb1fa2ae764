"""A tiny configuration of every causal language model in transformers: its own defaults, made small field by field.

Every kind of layer that the defaults have is kept, and what a checkpoint may switch on (biases, scales, soft caps,
dropout) is on, so that leaving any of it out shows.
"""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

VOCABULARY = 73
WINDOW = 6
LAYERS = 4

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_positions", "n_ctx", "max_seq_len", "max_position_embeddings"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2),
    **{"n_group": 2, "topk_group": 1, "num_shared_experts": 1, "n_shared_experts": 1, "moe_num_shared_experts": 1},
    **{"head_dim": 16, "global_head_dim": 16, "rotary_dim": 4, "query_pre_attn_scalar": 8},
    **{"sliding_window": WINDOW, "attention_window_size": WINDOW, "attention_chunk_size": 2 * WINDOW},
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"qk_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 512},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{"mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    **{"mamba_n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1},
    **{"mamba_headdim": 8, "mamba_ngroups": 1, "n_mamba_heads": 2, "state_size": 8, "time_step_rank": 4},
    **{"mamba_chunk_size": 16, "chunk_size": 16, "hidden_size_per_layer_input": 8},
}
"""Sizes by the name of the field; a field that is None or 0 by default stays as it is."""
_SWITCHED_ON: dict[str, Any] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "lm_head_bias"), True),
    **dict.fromkeys(("qk_norm", "use_qk_norm", "qk_layernorm", "norm_topk_prob"), True),
    **{"logit_scale": 0.5, "logits_scaling": 2.0, "lm_head_multiplier": 0.3, "embedding_multiplier": 3.0},
    **{"residual_multiplier": 0.7, "attention_multiplier": 0.2, "clip_qkv": 2.0, "routed_scaling_factor": 2.5},
    **{"final_logit_softcapping": 8.0, "attn_logit_softcapping": 2.0, "router_jitter_noise": 0.1},
    **{"input_jitter_noise": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1, "dropout": 0.1},
    **{"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "emb_pdrop": 0.1, "residual_dropout": 0.1},
    **{"embedding_dropout": 0.1},
}
"""Values of fields that change what a model computes, whatever their defaults."""
_LATENT = {"num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 12}
"""Attention over latents: every head has keys of its own, and `head_dim` is the part that is rotated."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PERCEPTION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28},
    **{"patch_size": 14, "depth": 2, "num_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "global_head_dim": 8},
}
"""Sizes of a tower for images or sound, which text does not enter."""

_WINDOWS = ["sliding_attention", "full_attention"] * 2
_ALL_WINDOWS = {"sliding_window": WINDOW}
_QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _WINDOWS}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE, _SHORT_MROPE = (
    {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": section}}} for section in ([1, 1, 2], [1, 1, 0])
)
_ROPE_BY_KIND = dict.fromkeys(("sliding_attention", "full_attention"), _ROPE)
_GEMMA4 = {"pad_token_id": 0, "global_head_dim": 24}
_GEMMA4_SECTION = {"text_config": _GEMMA4}
_GEMMA4_EXPERTS = {
    **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
}
_GEMMA_SHARED = {
    **{"pad_token_id": 0, "num_hidden_layers": 6, "layer_types": _WINDOWS + _WINDOWS[:2], "num_kv_shared_layers": 2},
    **{"laurel_rank": 8, "intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4},
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_DELTA = {"linear_head_dim": 8, "linear_num_heads": 4, "num_expert_group": 2, "num_experts_per_token": 2}
_INDEXED = {"num_hidden_layers": 2}
_OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_KIND},
    "cwm": {"bos_token_id": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "attn_pdrop": 0.1, "rope_theta": 10000.0},
        "ffn_config": {"moe_top_k": 2, "moe_jitter_eps": 0.1, "hidden_size": 32},
    },
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma3": {"text_config": {"final_logit_softcapping": None}},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA4),
    # Their defaults have no tower.
    "gemma4": _GEMMA4_SECTION | {"vision_config": _PERCEPTION | {"model_type": "gemma4_vision", "patch_size": 4}},
    "gemma4_unified": _GEMMA4_SECTION | {"vision_config": {"mm_embed_dim": 32, "output_proj_dims": 32}},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "ministral": {"head_dim": 16, "layer_types": _WINDOWS},
    "opt": {"layerdrop": 0.5},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm46v", "glm4v", "glm_ocr"), _MROPE),
    "glm4v_moe": _SHORT_MROPE,
    **dict.fromkeys(("mixtral", "phi3", "starcoder2"), _ALL_WINDOWS),
    **dict.fromkeys(("qwen2", "qwen3", "smollm3"), _QWEN_WINDOWS),
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW, "mlp_only_layers": [0]},
    "qwen2_moe": {"mlp_only_layers": [0]},
    # Not accepted yet.
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa"), _INDEXED),
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "shared_intermediate_size": 48},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTIONS),
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4, "zero_expert_num": 2},
    "gemma3n_text": _GEMMA_SHARED,
    "mpt": {"attn_pdrop": 0},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "zamba2": {"n_mamba_heads": 8, "layers_block_type": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8, "first_k_dense_replace": 1},
    "diffllama": {"attention_dropout": 0.0},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(("bailing_hybrid", "kimi_linear"), _DELTA),
}
"""What a model type needs beside these tables."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoehybrid, attention only": ("granitemoehybrid", {"layer_types": ["attention"] * LAYERS}),
    "granitemoehybrid, dense": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * LAYERS, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "lfm2, attention only": ("lfm2", {"layer_types": ["full_attention"] * LAYERS}),
    "gemma4_text, experts": ("gemma4_text", _GEMMA4_EXPERTS),
    "gemma4_text, keys are values": ("gemma4_text", _GEMMA4_EXPERTS | {"enable_moe_block": False}),
    "gemma4_text, shared keys": ("gemma4_text", _GEMMA_SHARED | {"intermediate_size": 48}),
    "gemma3n_text, nothing shared": ("gemma3n_text", {"num_kv_shared_layers": 0}),
    "gemma3, head with a cap": ("gemma3", {"text_config": {"final_logit_softcapping": 8.0}}),
    "opt, projected": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, unscaled": ("gpt2", {"scale_attn_weights": False}),
    "gpt2, upcast": ("gpt2", {"reorder_and_upcast_attn": True}),
    "gpt_bigcode, all heads": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neox, sequential": ("gpt_neox", {"use_parallel_residual": False}),
}
"""Further configurations of a model type, by a name of their own: (model type, changes)."""


def tiny_architecture(name: str) -> PretrainedConfig:
    """Return the tiny configuration of a model type, or of one of `VARIANTS`."""
    model_type, variation = VARIANTS.get(name, (name, {}))
    defaults = AutoConfig.for_model(model_type)
    given = _small(defaults.to_dict(), _OWN.get(model_type, {}) | variation)
    return AutoConfig.for_model(model_type, **given)


def _small(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that make a configuration small, given those of its defaults."""
    depth = next((defaults[name] for name in ("num_hidden_layers", "n_layer", "n_layers") if name in defaults), 0)
    layers = own.get("num_hidden_layers", LAYERS)
    small: dict[str, Any] = {}
    for field, value in defaults.items():
        if isinstance(value, dict) and "model_type" in value:
            text = "text" in field or "attn_config" in field or "ffn_config" in field
            section = own.get(field, {})
            small[field] = _small(value, section) if text else _shrunk(value, _PERCEPTION) | section
        elif isinstance(value, list) and depth and len(value) == depth:
            small[field] = _pattern(field, value, layers, defaults)
    sized = {field: size for field, size in _shrunk(defaults, _SIZES).items() if field not in small}
    switched = {field: value for field, value in _SWITCHED_ON.items() if field in defaults}
    tokens = {field: None for field in _TOKENS if field in defaults}
    latent = _LATENT if defaults.get("kv_lora_rank") else {}
    # The sections are small already.
    own = {field: value for field, value in own.items() if not isinstance(small.get(field), dict)}
    return small | sized | switched | tokens | latent | own


def _shrunk(defaults: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    kept = {field: size for field, size in sizes.items() if defaults.get(field)}
    return kept | ({"model_type": defaults["model_type"]} if "model_type" in kept else {})


def _pattern(field: str, values: list[Any], layers: int, defaults: dict[str, Any]) -> list[Any]:
    """Return one value for each of a few layers, so that each value of all layers is there."""
    kinds = list(dict.fromkeys(map(_hashable, values)))
    if field == "layer_types":
        if kinds == ["full_attention"] and defaults.get("sliding_window"):
            kinds = ["sliding_attention", "full_attention"]
        return [kinds[number % len(kinds)] for number in range(layers)]
    if (name := field.removesuffix("_per_layer")) in _SIZES:
        kinds = [_SIZES[name]]
    return (kinds + kinds[-1:] * layers)[:layers]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
