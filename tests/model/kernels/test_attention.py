"""The kernel of attention over ragged sequences, against its definition in float64."""

import random

import pytest
import torch

from hybrid_grpo.model.attention import Segments
from hybrid_grpo.model.kernels import build as kernels
from hybrid_grpo.model.ragged_attention import Options

pytestmark = pytest.mark.skipif(kernels.load() is None, reason="needs a C compiler")
CPU = torch.device("cpu")


def layout(seed, groups=3, longest=20):
    """Own tokens and prefixes of prompts, some with completions; and the number of tokens."""
    rng = random.Random(seed)
    own, prefix, at = [], [], 0
    for _ in range(groups):
        own.append((at, rng.randint(1, longest)))
        prefix.append((0, 0))
        prompt = own[-1]
        at += prompt[1]
        for _ in range(rng.randint(0, 4)):
            own.append((at, rng.randint(1, longest)))
            prefix.append(prompt)
            at += own[-1][1]
    return own, prefix, at


def inputs(tokens, heads, kv, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, tokens, heads, d), (1, tokens, kv, d), (1, tokens, kv, d))
    # As a model hands them over: heads before tokens, tokens first in memory.
    return [torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes]


def definition(own, prefix, query, key, value, scale, window, softcap, sinks=None):
    """One query at a time. A sink is one more logit, whose value is zero."""
    q, k, v = (x.double()[0] for x in (query, key, value))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    rows = []
    for (start, length), (before, count) in zip(own, prefix, strict=True):
        places = [*range(before, before + count), *range(start, start + length)]
        for i in range(length):
            seen = places[: count + i + 1]
            seen = seen[-window:] if window else seen
            logits = (k[:, seen] @ q[:, start + i, :, None])[..., 0] * scale
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            logits = logits if sinks is None else torch.cat([logits, sinks.double()[:, None]], 1)
            rows.append((logits.softmax(-1)[:, None, : len(seen)] @ v[:, seen])[:, 0])
    return torch.stack(rows)[None]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize(("seed", "has_sinks"), [(0, False), (1, False), (2, True), (3, True)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (5, 0.0), (1000, 0.0), (0, 2.0), (7, 0.7)])
@pytest.mark.parametrize(("heads", "kv", "d"), [(4, 2, 32), (2, 2, 7), (6, 1, 16), (7, 7, 33), (16, 2, 80)])
def test_values_and_gradients_are_those_of_the_definition(heads, kv, d, window, softcap, seed, has_sinks, dtype, close):
    own, prefix, tokens = layout(seed)
    given = [x.detach().to(dtype).requires_grad_() for x in inputs(tokens, heads, kv, d, seed)]
    sinks = 3 * torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if has_sinks else None
    leaves = given if sinks is None else [*given, sinks.requires_grad_()]
    options = Options(0.4, window, softcap, sinks)
    expected = definition(own, prefix, *given, *options)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.autograd.grad((expected * weight).sum(), leaves)
    found = Segments(own, prefix, CPU).attend(*given, options)
    assert found.dtype == dtype and (found - expected).abs().max() < close * max(1.0, float(expected.abs().max()))
    mine = torch.autograd.grad((found * weight).sum(), leaves)
    for gradient, other in zip(mine, theirs, strict=True):
        assert (gradient - other).abs().max() < close * max(1.0, float(other.abs().max()))


def test_a_long_sequence_and_large_logits():
    own, prefix, tokens = [(0, 300), (300, 500)], [(0, 0), (0, 300)], 800
    given = inputs(tokens, 2, 1, 64)
    found = Segments(own, prefix, CPU).attend(*given, Options(30.0))
    expected = definition(own, prefix, *given, 30.0, 0, 0.0)
    assert (found - expected).abs().max() < 1e-3 and torch.isfinite(found).all()


def test_a_sequence_has_the_same_values_and_gradients_wherever_it_stands_and_with_any_threads():
    own, prefix, tokens = layout(5, groups=6, longest=40)
    given = inputs(tokens, 4, 2, 32)

    def run(own, prefix, rows):
        parts = [tensor[:, :, rows].detach().requires_grad_() for tensor in given]
        out = Segments(own, prefix, CPU).attend(*parts, Options(0.2))
        out.square().sum().backward()
        return [out[0], *(part.grad[0].transpose(0, 1) for part in parts)]

    whole = run(own, prefix, slice(None))
    firsts = [i for i, (_, count) in enumerate(prefix) if not count]
    for i, end in zip(firsts, [*firsts[1:], len(own)], strict=True):
        at = own[i][0]
        rows = slice(at, sum(own[end - 1]))
        moved = [(start - at, length) for start, length in own[i:end]]
        alone = run(moved, [(before - at if count else 0, count) for before, count in prefix[i:end]], rows)
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, whole, strict=True))
    try:
        torch.set_num_threads(2)
        assert all(torch.equal(a, b) for a, b in zip(run(own, prefix, slice(None)), whole, strict=True))
    finally:
        torch.set_num_threads(1)
