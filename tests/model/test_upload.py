from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

from hybrid_grpo.model.upload import upload


def test_a_gpu_copies_from_pinned_memory_and_the_host_goes_on():
    calls = []

    def pin_memory(tensor):
        calls.append("pin")
        return SimpleNamespace(to=lambda device, non_blocking: calls.append((device.type, non_blocking)) or tensor)

    with patch.object(torch.Tensor, "pin_memory", pin_memory):
        assert upload([[1, 2], [3, 4]], torch.device("cuda", 0)).tolist() == [[1, 2], [3, 4]]
    assert calls == ["pin", ("cuda", True)]
    assert upload(np.array([1], dtype=np.int32), torch.device("cpu")).dtype == torch.int32
