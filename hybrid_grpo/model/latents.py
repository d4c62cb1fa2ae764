"""Attention over what layers cache in place of keys and values: one latent for all heads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def caches_latents(module: nn.Module) -> bool:
    """Whether a layer expands keys and values from latents by one product (DeepSeek-V2, arXiv:2405.04434)."""
    product = getattr(module, "kv_b_proj", None)
    return hasattr(module, "expand_kv") and type(product) is nn.Linear and product.bias is None


def absorbed(query: Tensor, latents: Tensor, module: Any, attend: Callable[..., Tensor]) -> Tensor:
    """Compute attention over latents, which all heads share, in place of the keys and values that they would be
    expanded to: the product that expands keys is applied to the query, the one of values to the result.

    Args:
        query: [n, heads, q, nope + rope]; latents: [n, 1, k, rank + rope].
        attend: computes attention [n, q, heads, rank] of a query [n, heads, q, rank + rope], keys and values.

    Returns [n, q, heads, value_dim].
    """
    nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
    weight_HDR = module.kv_b_proj.weight.view(query.shape[1], -1, rank)
    of_keys_HDR, of_values_HDR = weight_HDR[:, :nope], weight_HDR[:, nope:]
    rotated = query[..., nope:]
    query = torch.cat([query[..., :nope] @ of_keys_HDR, rotated], dim=-1)
    out = attend(query, latents, latents[..., :rank])
    return torch.einsum("nqhr,hdr->nqhd", out, of_values_HDR)
