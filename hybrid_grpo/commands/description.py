"""Names the attention that trains and the one that decodes, for the start of a run."""

import torch

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.generation.paged_attention import PAGE, has_kernel
from hybrid_grpo.model.architectures import has_sinks, layer_configs
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.kernels.build import usable
from hybrid_grpo.model.loading import load_config, training_attention
from hybrid_grpo.model.ragged_attention import Options, has_flash, has_ragged_kernel
from hybrid_grpo.model.upload import on_gpu

_WIDTHS = ("head_dim", "qk_head_dim", "v_head_dim")
"""Settings of a configuration that name the width of a head."""
_WIDEST = 256
"""Numbers in the widest heads that the GPU kernels for training support."""


def describe(policy: PolicyConfig, device: torch.device, *, paged: bool = False) -> str:
    """Return a line that names the attention used for training a model and, if `paged`, for decoding it. If a GPU has
    no kernel for it, the line includes a remedy."""
    config, dtype = load_config(policy.model), getattr(torch, policy.dtype)
    training, text = training_attention(policy, config), config.get_text_config()
    widths = [getattr(layer, name, None) or 0 for layer in layer_configs(config) for name in _WIDTHS]
    head_dim = max(widths) or text.hidden_size // (getattr(text, "num_attention_heads", 0) or 1)
    softcap, sinks = getattr(text, "attn_logit_softcapping", None) or 0.0, has_sinks(config)
    like = torch.empty(1, 1, 1, head_dim, dtype=dtype, device=device)
    in_c = usable(like.float())
    kernel = "C kernels" if in_c else "flash-attn" if has_flash(like) else "torch's varlen_attn"
    packed = kernel if in_c or not sinks else "torch's varlen_attn"
    slow = "torch, on padded sequences" if on_gpu(device) else "torch, one sequence after another"
    trains = packed if in_c or has_ragged_kernel(like, softcap, sinks) else slow
    ways = {"training": trains if training == ATTENTION else f"transformers' {training}"}
    if paged and in_c:
        ways["decoding"] = "products with latents" if getattr(text, "kv_lora_rank", None) else kernel
    elif paged:
        heads, rank = getattr(text, "num_attention_heads", 1), getattr(text, "kv_lora_rank", None)
        d, v, kv = head_dim, head_dim, getattr(text, "num_key_value_heads", None) or heads
        if rank:
            d, v, kv = rank + text.qk_rope_head_dim, rank, 1
        options = Options(1.0, softcap=softcap, sinks=like if sinks else None)
        seen = has_kernel(device, PAGE, like.new_empty(1, d), like.new_empty(1, v), heads // kv, options)
        ways["decoding"] = "a Triton kernel" if seen else "torch, on copies of all pages"
    line = ", ".join(f"{what} by {way}" for what, way in ways.items())
    if on_gpu(device) and "torch," in ways["training"]:
        cure = "install flash-attn (the extra flash) or torch 2.12"
        if head_dim > _WIDEST:
            cure = f"heads of {head_dim} numbers are wider than {_WIDEST}"
        elif dtype not in (torch.bfloat16, torch.float16):
            cure = "set policy.dtype: bfloat16"
        line += f"; WARNING: slow, because no GPU kernel supports this: {cure}"
    return line
