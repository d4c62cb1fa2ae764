"""How much memory keys and values may take."""

from __future__ import annotations

import psutil
import torch

_GPU_SHARE = 0.9
"""Of the free memory; the rest is for activations of prefills and logits."""
_HOST_SHARE = 0.5


def budget_bytes(cache_gb: float | None, device: torch.device) -> int:
    """Bytes for the cache: `cache_gb` GiB, or a share of what is free on the device now."""
    if cache_gb is not None:
        return int(cache_gb * 2**30)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(_GPU_SHARE * (free + held))
    return int(_HOST_SHARE * psutil.virtual_memory().available)
