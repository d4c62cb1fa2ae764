"""Tiles of the log-probability head by the kernels, against log_softmax and its gradient in float64."""

import pytest
import torch
from gpu_kernels import DEVICE, DTYPES, cases, rounding

from hybrid_grpo.model import softmax
from hybrid_grpo.model.kernels.gpu.softmax import add, gradient
from hybrid_grpo.model.softmax import TiledSoftmax

ROUNDINGS = 4e-7 if DEVICE == "cpu" else 2e-6
"""A GPU's exponential is off by a rounding of its argument."""


@pytest.mark.parametrize("case", cases())
def test_tiles_add_up_to_the_softmax_and_its_gradient(case, seeded):
    rng, generator = seeded(case)
    dtype, n = rng.choice(DTYPES), rng.randint(1, 3)
    widths = [rng.choice([1, 5, 300, 2048, 2049]) for _ in range(rng.randint(1, 3))]
    temperature, scale = rng.choice([1.0, 0.3, 2.0]), rng.choice([1e-3, 1.0, 10.0])
    # A tile may be a view of something wider.
    wide = (scale * torch.randn(n, sum(widths) + 3, generator=generator)).to(DEVICE, dtype)
    logits = wide[:, : sum(widths)]
    if case % 10 == 0:
        logits[0, :] = -1e4
        logits[0, rng.randrange(sum(widths))] = 5.0
    target_N = torch.tensor([rng.randrange(sum(widths)) for _ in range(n)], device=DEVICE)
    if case % 10 == 1:
        logits[:, 1:] = torch.where(torch.rand(n, sum(widths) - 1, generator=generator) < 0.5, -torch.inf, 0.0)
        target_N[:] = 0
    x = (logits.double() / temperature).requires_grad_()
    logp = x.log_softmax(-1)
    logp_N = logp.gather(1, target_N[:, None])[:, 0]
    # A token that cannot be has no part in the entropy.
    entropy_N = -(logp.exp() * logp.where(logp.isfinite(), 0.0)).sum(-1)

    tiled, first = TiledSoftmax(target_N, temperature), 0
    tiles = list(logits.split(widths, dim=1))
    for tile in tiles:
        add(tiled.sums(slice(None)), tile, target_N, temperature, first)
        first += tile.shape[1]
    size = 1 + x.abs().where(x.isfinite(), 0.0).amax(-1)
    assert ((tiled.logp_N() - logp_N).abs() <= ROUNDINGS * (size - logp_N)).all()
    assert ((tiled.entropy_N() - entropy_N).abs() <= 4e-6 * size).all()

    dlogp_N = torch.randn(n, generator=generator).to(DEVICE)
    dentropy_N = torch.randn(n, generator=generator).to(DEVICE) if rng.random() < 0.5 else None
    total = (dlogp_N * logp_N).sum() + (0 if dentropy_N is None else (dentropy_N * entropy_N).sum())
    (expected,) = torch.autograd.grad(total, x)
    first = 0
    for tile, part in zip(tiles, (expected / temperature).split(widths, dim=1), strict=True):
        out = torch.empty(tile.shape, dtype=rng.choice([dtype, torch.float32]), device=DEVICE)
        given = (tiled.normalizer_N(), target_N, tiled.entropy_N(), dlogp_N, dentropy_N)
        gradient(out, tile, *given, temperature, first)
        first += tile.shape[1]
        seen = part.isfinite() & tile.isfinite()
        assert seen.any() or not tile.isfinite().any()
        terms = size[:, None] * 1e-5 + torch.finfo(out.dtype).tiny
        bound = 2 * rounding(out.dtype) * part.abs() + terms * (1 / temperature)
        assert ((out.double() - part).abs() <= bound)[seen].all()


def test_the_head_with_kernels_is_the_head_without(monkeypatch):
    """Through `token_logprobs`, with a soft cap and several tiles, in float32, gradients of all parts."""
    from hybrid_grpo.model.kernels.gpu import launcher
    from hybrid_grpo.model.logprobs import LogitShape, token_logprobs

    def run(kernels):
        monkeypatch.setattr(launcher, "on_gpu", lambda _: kernels)
        softmax.gpu.proven.cache_clear()
        generator = torch.Generator().manual_seed(0)
        hidden, weight, bias = (
            torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_() for shape in ((9, 16), (70, 16), (70,))
        )
        target = torch.randint(70, (9,), generator=generator).to(DEVICE)
        shape = LogitShape(0.5, 3.0)
        logp, entropy = token_logprobs(
            hidden, weight, bias, target, shape=shape, temperature=0.7, tile_bytes=600, tile_columns=30
        )
        (logp.sum() + 0.3 * entropy.square().sum()).backward()
        return [logp.detach(), entropy.detach(), hidden.grad, weight.grad, bias.grad]

    with torch.no_grad():
        assert softmax._kernel_agrees(torch.device(DEVICE), torch.bfloat16), "also where gradients are off"
    for ours, torchs in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(ours, torchs, atol=1e-5, rtol=1e-5)
