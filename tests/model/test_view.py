"""Where whole weights lie; that they are right is seen wherever ranks sample."""

import pytest
import torch
from torch import nn

from hybrid_grpo.model import view


@pytest.mark.parametrize("world", [2, 3, 7])
def test_gathered_weights_begin_where_kernels_load_them_fastest(monkeypatch, world):
    """With 3, 5, 6 or 7 ranks almost all weights began off a multiple of 16 bytes, since shards are rounded up."""
    shapes = [(5, 7), (1, 3), (11, 9), (2, 2)]
    source = nn.ParameterList(nn.Parameter(torch.empty(0, dtype=torch.bfloat16)) for _ in shapes)
    whole = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    of_shard = {}
    for parameter, value in zip(source, whole, strict=True):
        size = -(-value.numel() // world)
        padded = torch.cat([value.flatten(), torch.full((world * size - value.numel(),), torch.nan).bfloat16()])
        parameter.ds_tensor, parameter.ds_numel, parameter.ds_shape = padded[:size], value.numel(), value.shape
        of_shard[parameter.ds_tensor.data_ptr()] = padded
    monkeypatch.setattr(view, "world_size", lambda: world)
    monkeypatch.setattr(
        torch.distributed, "all_gather_into_tensor", lambda out, shard: out.copy_(of_shard[shard.data_ptr()])
    )
    module = nn.ParameterList(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes)
    made = view.View(source, module, True, torch.device("cpu"))
    made.gather()
    first = module[0].data_ptr()
    for parameter, value in zip(module, whole, strict=True):
        assert torch.equal(parameter, value) and (parameter.data_ptr() - first) % 128 == 0
