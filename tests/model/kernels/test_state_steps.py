"""The C kernels for one token through layers with a state, against the functions of transformers."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from hybrid_grpo.model.kernels import states
from hybrid_grpo.model.kernels.build import usable

pytestmark = pytest.mark.skipif(not usable(torch.ones(1)), reason="needs a C compiler")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ROWS = (1, 3, 70)


def original(function: Any) -> Any:
    return getattr(function, "replaces", function)


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize(("channels", "kernel", "biased", "activation"), [(5, 4, True, "silu"), (96, 3, False, None)])
def test_convolution(n: int, channels: int, kernel: int, biased: bool, activation: str | None) -> None:
    torch.manual_seed(n)
    x, _ = torch.randn(n, 1, channels + 3).split([channels, 3], dim=-1)  # as layers split it: rows apart
    x, state, weight = x.transpose(1, 2), torch.randn(n, channels, kernel), torch.randn(channels, kernel)
    given = weight, torch.randn(channels) if biased else None, activation
    own = state.clone()
    out, expected = states.causal_conv1d_update(x, own, *given), original(qwen.causal_conv1d_update)(x, state, *given)
    torch.testing.assert_close(out, expected, **CLOSE)
    assert torch.equal(own, state)


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize(("key_heads", "heads", "dk", "dv"), [(2, 4, 64, 64), (3, 3, 7, 130), (1, 2, 128, 20)])
@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_rule(n: int, key_heads: int, heads: int, dk: int, dv: int, by_channel: bool) -> None:
    torch.manual_seed(n)
    key_heads = heads if by_channel else key_heads
    mixed = torch.randn(n, 1, 2 * key_heads * dk + heads * dv)  # as layers split it: rows apart
    query, key, value = mixed.split([key_heads * dk, key_heads * dk, heads * dv], dim=-1)
    query, key, value = (part.unflatten(-1, (-1, d)) for part, d in ((query, dk), (key, dk), (value, dv)))
    log_decay = -torch.rand(n, 1, heads, dk) if by_channel else -torch.rand(n, 1, heads)
    beta, state = torch.rand(n, 1, heads), torch.randn(n, heads, dk, dv)
    rule = kimi.recurrent_kimi_delta_attention if by_channel else qwen.torch_recurrent_gated_delta_rule
    more: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, last = original(rule)(query, key, value, g=log_decay, beta=beta, initial_state=state.clone(), **more)
    out = states.recurrent_delta_rule(query, key, value, log_decay, beta, state, unit=True)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(state, last, **CLOSE)


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize(("groups", "heads", "d", "size"), [(1, 4, 16, 32), (2, 4, 5, 17)])
def test_mamba_2(n: int, groups: int, heads: int, d: int, size: int) -> None:
    torch.manual_seed(n)
    mixed = torch.randn(n, heads * d + 2 * groups * size)
    x, b, c = mixed.split([heads * d, groups * size, groups * size], dim=-1)
    x, b, c = x.unflatten(1, (heads, d)), b.unflatten(1, (groups, size)), c.unflatten(1, (groups, size))
    step = torch.rand(n, heads, 1).expand(-1, -1, d)
    a, skip = (-torch.rand(heads))[:, None, None].expand(-1, d, size), torch.randn(heads)[:, None].expand(-1, d)
    state = torch.randn(n, heads, d, size)
    own = state.clone()
    out = states.state_space_update(own, x, step, a, b, c, skip)
    torch.testing.assert_close(
        out, original(bamba.mamba2_selective_state_update)(state, x, step, a, b, c, skip), **CLOSE
    )
    torch.testing.assert_close(own, state, **CLOSE)


def test_gated_norm() -> None:
    norm = qwen.Qwen3_5RMSNormGated(24, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 9, 24)
    torch.testing.assert_close(states.gated_norm(norm, x, gate), norm(x, gate), **CLOSE)


def unfit(**changed: Tensor) -> dict[str, Tensor]:
    n, heads, d = 2, 2, 8
    fit = {name: torch.randn(n, 1, heads, d) for name in ("query", "key", "value")}
    return fit | {"log_decay": torch.zeros(n, 1, heads), "beta": torch.ones(n, 1, heads)} | changed


@pytest.mark.parametrize("state, changed", [
    (torch.zeros(2, 2, 8, 8, dtype=torch.bfloat16), {}),
    (torch.zeros(2, 2, 8, 8).transpose(2, 3)[:, :, :, :], {}),
    (torch.zeros(2, 2, 8, 8), {"query": torch.randn(2, 1, 8, 2).transpose(2, 3)}),
    (torch.zeros(2, 2, 8, 8), {"key": torch.randn(2, 1, 2, 8).double()}),
    (torch.zeros(1, 2, 8, 8), {}),
])  # fmt: skip
def test_what_does_not_fit_is_left_to_torch(state: Tensor, changed: dict[str, Tensor]) -> None:
    assert states.recurrent_delta_rule(**unfit(**changed), state=state, unit=True) is None
