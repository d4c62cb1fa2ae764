"""Bytes that the layers of a training step move on a GPU, counted on fake tensors by budget.py."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2Config

from hybrid_grpo.data.packing import pack
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.layers import fuse

TOKENS, LAYERS = 16384, 28
SHAPES = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
}
"""Qwen2.5."""


def moved(size: str, layers: int, counted: Callable[[], Any], products: Container[str]) -> dict[str, int]:
    """The bytes of each operation in the forward and backward of a packed micro-batch of 32 rows with checkpointing,
    without the matrix products, the kernel of attention, and the head."""
    config = Qwen2Config(**SHAPES[size], vocab_size=151936, num_hidden_layers=layers, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION).base_model
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model.to_empty(device="cpu")
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        # The engine takes gradients as soon as they are there.
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    fuse(model, None)
    rows = [[1] * 256 for _ in range(TOKENS // 512)]
    [micro] = pack(rows, [[*row, 1] for row in rows], range(len(rows)), TOKENS, torch.device("cpu"), share="off")
    assert micro.input_ids_bS.numel() == TOKENS
    given = {"input_ids": micro.input_ids_bS, "position_ids": micro.position_ids, "batch": micro.segments}
    with fake, counted() as count:
        model(**given, use_cache=False).last_hidden_state.sum().backward()
    return {name: n for name, n in count.bytes.items() if name not in products and "varlen" not in name}


def measure(counted: Callable[[], Any], products: Container[str]) -> dict[str, float]:
    """The numbers of the budget. `counted` counts the operations inside it, and `products` are not counted."""
    numbers = {}
    for size in SHAPES:
        one, two = (sum(moved(size, layers, counted, products).values()) for layers in (1, 2))
        numbers[f"training_elementwise_gb_{size}"] = (one + (LAYERS - 1) * (two - one)) / 1e9
    return numbers
