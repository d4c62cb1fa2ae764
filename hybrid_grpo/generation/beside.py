"""Memory for decoding of a model that generates beside the policy."""

from typing import Any

from hybrid_grpo.config import RolloutConfig
from hybrid_grpo.generation.graphs import bytes_of
from hybrid_grpo.generation.loop import PAGE
from hybrid_grpo.generation.workspace import Workspace
from hybrid_grpo.model.architectures import cached_numbers

_SHARE = 0.1
"""Fraction of a GPU's memory that the cache of a model beside the policy may take, or what one sequence needs."""


def workspace_beside(
    config: RolloutConfig, model_config: Any, dtype: str, rows: int, tokens: int, device_bytes: int
) -> tuple[Workspace, int]:
    """Return a workspace for a model that generates beside the policy, and the bytes that it takes on a GPU.

    It is kept from call to call: graphs are captured once, and the policy's cache cannot take its memory. It holds
    `rows` sequences of `tokens` tokens, or as many as its share of the GPU's `device_bytes` allows.
    """
    itemsize = 2 if dtype == "bfloat16" else 4
    pages, page_bytes = -(-tokens // PAGE) + 1, PAGE * cached_numbers(model_config) * itemsize
    share = int(_SHARE * device_bytes) // max(1, pages * page_bytes)
    slots = max(1, min(rows, config.max_slots, share))
    graphs = bytes_of(slots) + slots * model_config.get_text_config().vocab_size * itemsize
    taken = (slots * pages + 2) * page_bytes + graphs if config.decoder == "paged" else 0
    return Workspace(slots, tokens), taken
