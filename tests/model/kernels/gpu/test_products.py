"""Products with what stands around them, against their definitions in float64."""

import pytest
import torch
from bitsandbytes import functional
from gpu_kernels import DEVICE, cases, rounding

from hybrid_grpo.model.eight_bits import quantize
from hybrid_grpo.model.kernels.gpu import products
from hybrid_grpo.model.kernels.gpu.products import BLOCK, Matrix, Packed, product
from hybrid_grpo.model.kernels.gpu.tilings import Tiling

EPSILON = 1e-6


@pytest.mark.parametrize("case", cases())
def test_a_product_and_what_stands_around_it(case, seeded, monkeypatch):
    rng, generator = seeded(case)
    monkeypatch.setattr(products, "tiling_of", lambda _: Tiling(products=rng.choice([1, 16, 64])))
    dtype, n, outputs = (
        rng.choice([torch.bfloat16, torch.float32]),
        rng.choice([1, 3, 17, 70, 150]),
        rng.choice([5, 64, 130]),
    )
    in_four_bits, gate, adds = rng.random() < 0.3, rng.random() < 0.3, rng.random() < 0.5
    inputs = BLOCK * rng.choice([1, 5, 9]) if in_four_bits else rng.choice([8, 64, 328, 640])

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    gate = gate and not in_four_bits
    x, norm = random(n, 2 * inputs)[:, :inputs], random(inputs) if rng.random() < 0.5 else None
    weight, state = random(outputs * (1 + gate), inputs) / inputs**0.5, None
    exact = weight.double()
    if in_four_bits:
        weight, form = functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4", blocksize=BLOCK)
        state = Packed(form.code, form.absmax, form.state2.code, form.state2.absmax, form.offset)
        exact = functional.dequantize_4bit(weight, form).double()
    factors = None
    if not in_four_bits and rng.random() < 0.4:
        codes, factors = weight.to(torch.int8), weight.new_empty(len(weight), dtype=torch.float32)
        quantize(weight, codes, factors)
        weight, exact = codes, codes.double() * factors[:, None]
    bias, adapter, rank = None, None, rng.choice([3, 16, 20])
    if not gate:
        bias = random(outputs) if rng.random() < 0.5 else None
        adapter = (random(rank, inputs) / inputs**0.5, random(outputs, rank), 0.7) if rng.random() < 0.5 else None
    out = random(n, 2 * outputs)[:, :outputs]
    before, given, size = out.double(), x.double(), x.double().abs()
    if norm is not None:
        scale = norm.double() * (given.square().mean(1, keepdim=True) + EPSILON).rsqrt()
        given, size = given * scale, size * scale.abs()
    expected, size = given @ exact.T, size @ exact.abs().T
    if adapter is not None:
        down, up, factor = (of.double() if isinstance(of, torch.Tensor) else of for of in adapter)
        expected, size = expected + factor * given @ down.T @ up.T, size + given.abs() @ down.abs().T @ up.abs().T
    if bias is not None:
        expected, size = expected + bias.double(), size + bias.double().abs()
    if gate:
        (first, other), (of_first, of_other) = expected.chunk(2, 1), size.chunk(2, 1)
        expected, size = torch.nn.functional.silu(first) * other, of_first * other.abs() + (1 + first.abs()) * of_other
    if adds:
        expected, size = expected + before, size + before.abs()
    scratch = {}
    product(
        x, Matrix(weight, bias, state, adapter, factors), out, scratch, norm=norm, epsilon=EPSILON, gate=gate, add=adds
    )
    # Inputs, weights of four bits, what an adapter has between its matrices, and results are rounded, mostly at random.
    bound = (8 if dtype == torch.bfloat16 else 40) * rounding(dtype) * (expected.abs() + size / inputs**0.5)
    assert ((out.double() - expected).abs() <= bound).all()
    assert not any(arrived.any() for _, arrived in scratch.values())
