"""The kernels of training's layers and their gradients, against definitions in float64.

They round where a Llama layer rounds, so the bounds count roundings of the type, relative to what was rounded.
KERNEL_CASES=300 runs as many random cases of each as when they were written.
"""

import pytest
import torch
from gpu_kernels import DEVICE, DTYPES, assert_within, cases, random

from hybrid_grpo.model.kernels.gpu import norm
from hybrid_grpo.model.kernels.gpu.gate import SiluTimes, silu_times
from hybrid_grpo.model.kernels.gpu.norm import AddNorm, Formula
from hybrid_grpo.model.kernels.gpu.rotation import Rotate
from hybrid_grpo.model.layers import rms_norm, rotated

CASES = cases(20)
LLAMA, GEMMA, OLMO = Formula(1e-6), Formula(1e-6, 1.0, False), Formula(1e-5, 0.0, False)


def laid_out(x, how):
    """The same numbers: neighbors; with gaps between rows, as a part of a projection's output; or transposed."""
    if how == "apart":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x.transpose(0, 1).contiguous().transpose(0, 1) if how == "turned" else x


@pytest.mark.parametrize("case", CASES)
def test_norm_with_residual(case, seeded):
    rng, generator = seeded(case)
    dtype, size = rng.choice(DTYPES), rng.choice([1, 7, 64, 100, 128, 896, 1536, 2880])
    shape = (rng.randint(1, 3), rng.randint(1, 9), size)
    scale, formula, trains = rng.choice([1e-2, 1, 30]), rng.choice([LLAMA, GEMMA, OLMO]), rng.random() < 0.8
    x, residual, dtotal, dout = (
        laid_out(random(generator, dtype, *shape, scale=s), rng.choice(["", "apart", "turned"]))
        for s in (scale, scale, 1.0, 1.0)
    )
    residual = residual.requires_grad_() if rng.random() < 0.7 else None
    weight = random(generator, dtype, size).requires_grad_(trains)
    total, out = AddNorm.apply(x.requires_grad_(), residual, weight, formula)
    both = rng.random() < 0.7
    wanted = [leaf for leaf in (x, residual, weight) if leaf is not None and leaf.requires_grad]
    given = ([total, out], [dtotal, dout]) if both else ([out], [dout])
    found = torch.autograd.grad(given[0], wanted, given[1])
    if formula == LLAMA and residual is None:
        flat, normed = x.detach().reshape(-1, size), torch.empty(out.shape, dtype=dtype, device=DEVICE).view(-1, size)
        norm.rms_norm(flat, weight.detach(), formula.epsilon, normed, flat.new_empty(len(flat), dtype=torch.float32))
        assert torch.equal(normed, out.view_as(normed))

    exact = x.double() if residual is None else x.double() + residual.double()
    assert_within(total, exact, 1, exact.abs())
    # The norm is that of the rounded sum, which the model keeps.
    sums, w = total.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = rms_norm(sums, w, formula)
    assert_within(out, expected.detach(), 3, expected.detach().abs())
    dsums, dweight = torch.autograd.grad(expected, [sums, w], dout.double())
    inverse = (sums.detach().square().mean(-1, keepdim=True) + formula.epsilon).rsqrt()
    normed, part = sums.detach() * inverse, (dout.double() * (w.detach() + formula.offset)).abs()
    bound = inverse * (part + normed.abs() * (part * normed.abs()).mean(-1, keepdim=True))
    if both:
        dsums, bound = dsums + dtotal.double(), bound + dtotal.double().abs()
    for dx in found[: 1 + (residual is not None)]:
        assert_within(dx, dsums, 2, bound)
    if trains:
        assert_within(found[-1], dweight, 3, (dout.double() * normed).abs().sum((0, 1)))


@pytest.mark.parametrize("case", CASES)
def test_gate_times_up(case, seeded):
    rng, generator = seeded(case)
    dtype, shape = rng.choice(DTYPES), (rng.randint(1, 2), rng.randint(1, 3), rng.choice([1, 3, 255, 1024, 1025]))
    gate, up, dout = (
        laid_out(random(generator, dtype, *shape, scale=rng.choice([0.1, 1, 20])), rng.choice(["", "apart", "turned"]))
        for _ in range(3)
    )
    if case % 10 == 0:
        gate[0, 0, 0] = rng.choice([0.0, 80.0, -80.0, -1e4])
    out = SiluTimes.apply(gate.requires_grad_(), up.requires_grad_())
    # In a decode step both are parts of longer rows.
    rows, again = torch.cat([gate, up], -1).detach().flatten(0, 1), torch.empty_like(out).flatten(0, 1)
    silu_times(*rows.split(shape[-1], -1), again)
    assert torch.equal(again.view_as(out), out)
    dgate, dup = torch.autograd.grad(out, [gate, up], dout)
    g, u = (leaf.detach().double().requires_grad_() for leaf in (gate, up))
    expected = g * torch.sigmoid(g) * u
    of_gate, of_up = torch.autograd.grad(expected, [g, u], dout.double())
    g, u, d = g.detach(), u.detach().abs(), dout.double().abs()
    # A GPU's exponential is off by a rounding of its argument. A small silu is rounded to a step, and multiplied.
    argument = 1 + g.abs() * (dtype == torch.float32)
    tiny = torch.finfo(dtype).smallest_normal
    assert_within(out, expected.detach(), 3, expected.detach().abs() * argument + tiny * u)
    assert_within(dup, of_up, 3, of_up.abs() * argument + tiny * d)
    sigmoid = torch.sigmoid(g)
    assert_within(dgate, of_gate, 2, d * u * sigmoid * (1 + g.abs() * (1 - sigmoid)) * argument)


@pytest.mark.parametrize("case", CASES)
def test_rotation_of_queries_and_keys(case, seeded):
    rng, generator = seeded(case)
    dtype, d, kv = rng.choice(DTYPES), rng.choice([2, 16, 64, 80, 128]), rng.choice([1, 2, 3])
    rows, length, heads, r = rng.randint(1, 2), rng.randint(1, 4), kv * rng.choice([1, 3]), rng.choice([d, d // 4 * 2])
    r = r or d
    q, k, dq, dk = (random(generator, dtype, rows, length, count, d).transpose(1, 2) for count in 2 * (heads, kv))
    if rng.random() < 0.3:
        q, dk = q.contiguous(), laid_out(dk, "apart")
    angle = random(generator, torch.float32, rng.choice([1, rows]), length, r, scale=3.0)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    out = Rotate.apply(q.requires_grad_(), k.requires_grad_(), cos, sin)
    found = torch.autograd.grad(out, [q, k], [dq, dk])
    for x, rotation, given, dx in zip((q, k), out, (dq, dk), found, strict=True):
        assert rotation.transpose(1, 2).is_contiguous(), "the kernel of attention would copy it"
        exact = x.detach().double().requires_grad_()
        expected = rotated(exact, cos.double(), sin.double())
        (expected_dx,) = torch.autograd.grad(expected, exact, given.double())
        assert_within(rotation, expected.detach(), 3, with_partner(x.detach(), r))
        assert_within(dx, expected_dx, 3, with_partner(given, r))


def with_partner(x, r):
    """The sizes of what a rotation adds up: an element, and the one it is rotated with."""
    x = x.double().abs()
    return torch.cat([x[..., :r] + x[..., :r].roll(r // 2, -1), x[..., r:]], -1)
