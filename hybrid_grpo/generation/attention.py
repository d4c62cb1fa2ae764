"""The attention of the decoding view: reads the slot cache with every sequence at its own length.

Registered with transformers under the name `ATTENTION`. Since transformers builds no masks for a name it
does not know, the mask is made here, from the positions that the decode loop passes down as `positions_nq`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "hybrid_slots"


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    positions_nq: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each query over its own slot.

    Args:
        query: [n, heads, q, head_dim]; the queries stand at `positions_nq` of their sequences.
        key, value: [n, key_value_heads, length, head_dim]; entry j of a slot is position j of its sequence,
            entries behind the query are ignored.
        sliding_window: a query sees itself and the `sliding_window - 1` positions before it.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv:2408.00118 section 2).
        positions_nq: int64 [n, q].

    Returns:
        [n, q, heads, head_dim], and None for the weights.
    """
    assert positions_nq is not None, "the decode loop passes positions_nq"
    n, heads, q, head_dim = query.shape
    groups = heads // key.shape[1]
    scaling = head_dim**-0.5 if scaling is None else scaling
    entry = torch.arange(key.shape[2], device=key.device)
    allowed = entry <= positions_nq[:, :, None]
    if sliding_window is not None:
        allowed &= entry > positions_nq[:, :, None] - sliding_window
    # The heads of one key-value group become more queries of the same key: nothing is repeated in memory.
    query = query.reshape(n, key.shape[1], groups * q, head_dim)
    allowed = allowed.repeat(1, groups, 1)[:, None]
    if softcap is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scaling)
    else:
        logits = torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap)) * softcap
        weights = logits.masked_fill(~allowed, float("-inf")).softmax(-1, dtype=torch.float32)
        out = weights.to(value.dtype) @ value
    return out.reshape(n, heads, q, head_dim).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, slot_attention)
