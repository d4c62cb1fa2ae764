"""Numbers of the host as a tensor on the device."""

from typing import Any

import torch
from torch import Tensor


def upload(numbers: Any, device: torch.device) -> Tensor:
    """An array, a tensor of the host or nested lists, on the device.

    A GPU copies them from pinned memory after the work that it was given before, and the host goes on. From ordinary
    memory the host would wait until all of that work is done.
    """
    host = torch.as_tensor(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
