"""Copies numbers from the host to the device."""

from typing import Any

import torch
from torch import Tensor


def upload(numbers: Any, device: torch.device) -> Tensor:
    """Copy an array, a tensor in host memory or nested lists to the device.

    A GPU copies them from pinned memory when it reaches the copy, while the host continues; from pageable memory the
    host would wait until then.
    """
    host = torch.as_tensor(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
