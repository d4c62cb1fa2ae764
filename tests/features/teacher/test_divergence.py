"""Divergences from hidden states, against their definitions by autograd."""

import pytest
import torch
from torch import Tensor

from hybrid_grpo.features.teacher.divergence import (
    Divergence,
    NextTokens,
    grouped,
    head_divergence,
    kl_divergence,
    most_likely,
)
from hybrid_grpo.model.logprobs import LogitShape

N, D, V, COMMON = 7, 5, 11, 9
"""The head has rows for two tokens that the teacher does not have."""
REVERSE = Divergence()
DIVERGENCES = [REVERSE, Divergence("forward_kl"), Divergence("jsd", 0.5), Divergence("jsd", 0.1)]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def student(dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    found = (random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(N, D), (V, D), (V,)]))
    hidden_ND, weight_VD, bias_V = found
    return hidden_ND, weight_VD, bias_V if bias else None


def teacher(top_k: int, dtype: torch.dtype) -> tuple[Tensor, NextTokens]:
    """All log-probabilities of a teacher, and what it tells."""
    logp_NV = random(N, COMMON, dtype=dtype, seed=9).mul(2).log_softmax(1).detach()
    tokens = logp_NV.topk(top_k, 1).indices if top_k else None
    told = grouped(logp_NV, tokens)
    return logp_NV, NextTokens(told, None if tokens is None else tokens.int(), COMMON)


def term(of: Divergence, p: Tensor, q: Tensor) -> Tensor:
    """What one token, or one group, adds to a divergence."""
    if of.kind != "jsd":
        return p * (p / q).log() if of.kind == "reverse_kl" else q * (q / p).log()
    m = of.beta * q + (1 - of.beta) * p
    return of.beta * q * (q / m).log() + (1 - of.beta) * p * (p / m).log()


def definition(of: Divergence, given: tuple[Tensor, Tensor, Tensor | None], shape: LogitShape, told: NextTokens):
    """Sums of probabilities, group by group."""
    x = torch.nn.functional.linear(*given)[:, :COMMON] * shape.scale
    if shape.softcap is not None:
        x = torch.tanh(x / shape.softcap) * shape.softcap
    p_NV, q_NK, rows = (x / 0.7).softmax(1), told.logp_NK.exp(), []
    for n in range(N):
        own = list(range(COMMON)) if told.token_NK is None else told.token_NK[n].tolist()
        groups = [p_NV[n, v] for v in own]
        if told.token_NK is not None:
            groups.append(sum(p_NV[n, v] for v in range(COMMON) if v not in own))
        rows.append(sum(term(of, p, q) for p, q in zip(groups, q_NK[n], strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("of", DIVERGENCES, ids=str)
@pytest.mark.parametrize("dtype, limit", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("bias, shape", [(False, LogitShape()), (True, LogitShape(0.5, 2.0))])
@pytest.mark.parametrize("tile_bytes", [None, 4 * COMMON * 2])
def test_value_and_gradients_are_those_of_the_definition(of, dtype, limit, top_k, bias, shape, tile_bytes):
    given = student(dtype, bias)
    leaves = [tensor for tensor in given if tensor is not None]
    _, told = teacher(top_k, dtype)
    dvalue_N = random(N, dtype=dtype, seed=5).detach()
    (value_N,) = head_divergence(*given, shape, 0.7, teacher=told, divergence=of, tile_bytes=tile_bytes)
    expected_N = definition(of, given, shape, told)
    assert value_N.detach().tolist() == pytest.approx(expected_N.tolist(), rel=limit, abs=limit)
    ours, theirs = (torch.autograd.grad((v * dvalue_N).sum(), leaves, allow_unused=True) for v in (value_N, expected_N))
    # The gradient of a soft cap is float32 in any case.
    limit = max(limit, 1e-6) if shape.softcap else limit
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= limit * other.abs().max()
    assert not ours[1][COMMON:].any(), "tokens that the teacher does not have"


@pytest.mark.parametrize("of", DIVERGENCES, ids=str)
def test_gradients_are_finite_where_a_probability_is_zero_in_float32(of):
    """Of the policy or of the teacher: the forward KL has a gradient of p - q, however far apart they are."""
    x_NV = torch.tensor([[0.0, 300.0, 1.0], [300.0, 0.0, 1.0]], requires_grad=True)
    told = NextTokens(torch.tensor([[300.0, 0, 2], [0.0, 1, 2]]).log_softmax(1), None, 3)
    (value_N,) = head_divergence(torch.eye(2), x_NV.T, None, LogitShape(), 1.0, teacher=told, divergence=of)
    (gradient,) = torch.autograd.grad(value_N.sum(), x_NV)
    assert value_N.isfinite().all() and gradient.isfinite().all()
    if of.kind == "forward_kl":
        assert (gradient - (x_NV.softmax(1) - told.logp_NK.exp())).abs().max() < 1e-4


def test_the_generalized_divergence_lies_between_both():
    """For small beta it is beta KL(teacher || policy), for beta near 1 (1 - beta) KL(policy || teacher)."""
    given, told = student(torch.float64, bias=False), teacher(0, torch.float64)[1]

    def of(kind: str, beta: float = 0.5) -> Tensor:
        one = Divergence(kind, beta)  # type: ignore[arg-type]
        return head_divergence(*given, LogitShape(), 1.0, teacher=told, divergence=one)[0].detach()

    assert (of("jsd", 1e-7) / 1e-7).tolist() == pytest.approx(of("forward_kl").tolist(), rel=1e-5)
    assert (of("jsd", 1 - 1e-7) / 1e-7).tolist() == pytest.approx(of("reverse_kl").tolist(), rel=1e-5)


def test_in_bfloat16_no_more_than_the_logits_and_the_results_are_rounded():
    given, told = student(torch.bfloat16, bias=True), teacher(3, torch.float32)[1]
    exact = [tensor.detach().float().requires_grad_() for tensor in given if tensor is not None]
    found = []
    for leaves in (list(given), exact):
        tiles = 4 * COMMON * 2
        (kl_N,) = head_divergence(*leaves, LogitShape(), 0.7, teacher=told, divergence=REVERSE, tile_bytes=tiles)
        assert kl_N.dtype == torch.float32
        found.append([kl_N, *torch.autograd.grad(kl_N.sum(), leaves)])
    for rounded, expected, leaf in zip(found[0][1:], found[1][1:], given, strict=True):
        assert rounded.dtype == leaf.dtype and (rounded - expected).abs().max() < 0.03 * expected.abs().max()
    assert (found[0][0] - found[1][0]).abs().max() < 0.03 * found[1][0].max()


def test_frozen_weights_get_no_gradient():
    hidden_ND, weight_VD, _ = student(torch.float32, bias=False)
    given = hidden_ND, weight_VD.detach(), None, LogitShape(), 1.0
    (kl_N,) = head_divergence(*given, teacher=teacher(2, torch.float32)[1], divergence=REVERSE)
    kl_N.sum().backward()
    assert hidden_ND.grad is not None and hidden_ND.grad.abs().min() > 0


@pytest.mark.parametrize("of", DIVERGENCES, ids=str)
def test_what_counts_as_one_bounds_the_divergence_from_below(of):
    """It grows with the tokens that are told apart, up to the divergence itself: all but one leave a group of one."""
    given, divergences = student(torch.float64, bias=False), []
    for top_k in (1, 2, 4, COMMON - 1, 0):
        told = teacher(top_k, torch.float64)[1]
        value_N = head_divergence(*given, LogitShape(), 1.0, teacher=told, divergence=of)[0]
        divergences.append(value_N.sum().item())
    bounds = divergences[:-1]
    assert bounds == sorted(bounds) and 0 < bounds[0] < 0.9 * bounds[-1]
    assert divergences[-2] == pytest.approx(divergences[-1], rel=1e-12)


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_teacher_tells_its_most_probable_tokens(top_k):
    hidden_ND, weight_VD, _ = student(torch.float32, bias=False)
    told, *tokens = most_likely(hidden_ND, weight_VD, None, LogitShape(), 0.7, vocabulary=COMMON, top_k=top_k)
    logp_NV = ((hidden_ND @ weight_VD.T)[:, :COMMON] / 0.7).log_softmax(1)
    assert told.exp().sum(1).tolist() == pytest.approx([1.0] * N, abs=1e-6)
    chosen = logp_NV.sort(1, descending=True)
    for n in range(N):
        expected = logp_NV[n] if not top_k else chosen.values[n, :top_k]
        assert told[n, : len(expected)].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        assert not top_k or tokens[0][n].tolist() == chosen.indices[n, :top_k].tolist()
    assert len(tokens) == bool(top_k) and not told.requires_grad
    model = NextTokens(told, tokens[0] if tokens else None, COMMON)
    (kl_N,) = head_divergence(hidden_ND, weight_VD, None, LogitShape(), 0.7, teacher=model, divergence=REVERSE)
    assert kl_N.abs().max() < 1e-6, "of a model to itself"


def test_places_are_split_and_joined():
    _, told = teacher(2, torch.float32)
    parts = told.split([3, 1, 3])
    again = NextTokens.joined(parts, torch.device("cpu"))
    assert torch.equal(again.logp_NK, told.logp_NK) and torch.equal(again.token_NK, told.token_NK)
    assert parts[0].first().logp_NK.tolist() == told.logp_NK[:1].tolist()
    assert kl_divergence(told.logp_NK, again.logp_NK).abs().max() == 0
