"""Where whole weights lie; that they are right is seen wherever ranks sample."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybrid_grpo.model import gathered_weights as view


def sharded(monkeypatch, parameters, whole, world):
    """Give parameters shards as on the first of several ranks."""
    of_shard = {}
    for parameter, value in zip(parameters, whole, strict=True):
        size = -(-value.numel() // world)
        padded = torch.cat([value.flatten(), torch.full((world * size - value.numel(),), torch.nan).bfloat16()])
        parameter.ds_tensor, parameter.ds_numel, parameter.ds_shape = padded[:size], value.numel(), value.shape
        parameter.ds_status = SimpleNamespace(name="NOT_AVAILABLE")
        of_shard[parameter.ds_tensor.data_ptr()] = padded
    monkeypatch.setattr(view, "world_size", lambda: world)
    monkeypatch.setattr(
        torch.distributed, "all_gather_into_tensor", lambda out, shard: out.copy_(of_shard[shard.data_ptr()])
    )


@pytest.mark.parametrize("world", [2, 3, 7])
def test_gathered_weights_begin_where_kernels_load_them_fastest(monkeypatch, world):
    """With 3, 5, 6 or 7 ranks almost all weights began off a multiple of 16 bytes, since shards are rounded up."""
    shapes = [(5, 7), (1, 3), (11, 9), (2, 2)]
    source = nn.ParameterList(nn.Parameter(torch.empty(0, dtype=torch.bfloat16)) for _ in shapes)
    whole = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    sharded(monkeypatch, source, whole, world)
    module = nn.ParameterList(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes)
    made = view.View(source, module, True, torch.device("cpu"))
    made.gather()
    first = module[0].data_ptr()
    for parameter, value in zip(module, whole, strict=True):
        assert torch.equal(parameter, value) and (parameter.data_ptr() - first) % 128 == 0


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_weights_on_the_same_input_are_neighbors(monkeypatch, world):
    """Gathered, with padding behind shards, or copied from where an engine of one rank has them."""
    widths = {"q_proj": 64, "up_proj": 192, "k_proj": 32, "gate_proj": 192, "o_proj": 5, "v_proj": 33}

    def layer(device):
        parts = {name: nn.Linear(48, width, device=device).bfloat16() for name, width in widths.items()}
        return nn.ModuleDict(parts).requires_grad_(False)

    source, module = layer("cpu"), layer("meta")
    whole = [parameter.detach().clone() for parameter in source.parameters()]
    if world > 1:
        sharded(monkeypatch, source.parameters(), whole, world)
    made = view.View(source, module, world > 1, torch.device("cpu"), neighbors=True, keep=True)
    for _ in range(2):
        made.gather()
        for parameter, value in zip(module.parameters(), whole, strict=True):
            assert torch.equal(parameter, value)
        attention = [module[name].weight for name in ("q_proj", "k_proj", "v_proj")]
        assert torch.equal(view.joined(attention), torch.cat(attention))
        # Biases are no multiple of 128 bytes; gate and up are half of all weights, too much for a copy.
        assert (view.joined([module[name].weight for name in ("gate_proj", "up_proj")]) is None) == (world == 1)
        assert view.joined([module.o_proj.weight, module.q_proj.weight]) is None
        made.release()


@pytest.mark.parametrize("world", [1, 3])
def test_eight_bits_are_those_of_whole_weights_and_leave_the_way_for_exact_ones(monkeypatch, world):
    """Each is gathered by itself, and what is kept is at the same addresses; rows of zeros stay zeros."""
    layers = {"q_proj": (64, 8), "k_proj": (64, 5), "v_proj": (64, 7), "o_proj": (24, 16), "head": (64, 9)}

    def model(device):
        parts = {name: nn.Linear(*sizes, device=device).bfloat16() for name, sizes in layers.items()}
        return nn.ModuleDict(parts).requires_grad_(False)

    source, module = model("cpu"), model("meta")
    source.q_proj.weight[2] = 0
    whole = {name: parameter.detach().clone() for name, parameter in source.named_parameters()}
    if world > 1:
        sharded(monkeypatch, source.parameters(), whole.values(), world)
    made = view.View(source, module, world > 1, torch.device("cpu"), neighbors=True, keep=True, weights="int8")
    seen, x = set(), torch.randn(3, 64).bfloat16()
    made.gather(exact=True)
    for _ in range(2):
        made.gather()
        parts = [module[name] for name in ("q_proj", "k_proj", "v_proj")]
        for name, part in zip("qkv", parts, strict=True):
            weight, rounded = whole[f"{name}_proj.weight"], part.weight * part.weight.quant_state.scale[:, None]
            assert ((rounded - weight).abs() <= weight.abs().amax(1, keepdim=True).float() / 254 + 1e-6).all()
            assert part.weight.dtype == torch.int8 and (part.weight.abs().amax(1) == 127).all() == (name != "q")
            expected = nn.functional.linear(x, rounded.bfloat16(), whole[f"{name}_proj.bias"])
            torch.testing.assert_close(part(x), expected, rtol=0, atol=0)
        scales = [part.weight.quant_state.scale for part in parts]
        biases = [[part.bias for part in parts]] if world == 1 else []  # shards of biases are padded
        for group in ([part.weight for part in parts], scales, *biases):
            assert torch.equal(view.joined(group), torch.cat(group))
        seen.add(module.q_proj.weight.data_ptr())
        # Too short for the kernels, and the head.
        assert torch.equal(module.o_proj.weight, whole["o_proj.weight"]) and module.head.weight.dtype == torch.bfloat16
        made.release()
        assert all(parameter.numel() == 0 for parameter in module.parameters())
    assert len(seen) == 1
    made.gather(exact=True)
    assert all(torch.equal(parameter, whole[name]) for name, parameter in module.named_parameters())


@pytest.mark.parametrize("keep", [False, True])
def test_weights_that_the_engine_keeps_gathered_are_used_where_they_are(monkeypatch, keep):
    """Each step of the quickstart gathered its weights three times: for the engine, for decoding, and for training.
    Where addresses must stay the same, as for CUDA graphs, they are copied all the same."""
    source, module = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False, device="meta")
    whole = source.weight.detach().clone().bfloat16()
    source.weight.data = whole.clone()
    sharded(monkeypatch, source.parameters(), [whole], 2)
    source.weight.ds_status.name = "AVAILABLE"
    made = view.View(source, module, True, torch.device("cpu"), keep=keep)
    made.gather()
    assert torch.equal(module.weight, whole)
    assert (module.weight.data_ptr() == source.weight.data_ptr()) is not keep
