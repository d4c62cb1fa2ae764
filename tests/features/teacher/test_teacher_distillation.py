"""The gradient of distillation is that of the divergence: everything that can be sampled is enumerated."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_grpo.config import GrpoConfig
from hybrid_grpo.features.teacher.divergence import Divergence, NextTokens, head_divergence
from hybrid_grpo.features.teacher.settings import TeacherConfig
from hybrid_grpo.features.teacher.teacher import Teacher, measure_teacher, teacher_advantages, teacher_loss
from hybrid_grpo.grpo.loss import policy_loss
from hybrid_grpo.model.logprobs import LogitShape

V, T, COEF = 4, 3, 0.7
COMPLETIONS = list(product(range(V), repeat=T))
PREFIXES = [prefix for t in range(T) for prefix in product(range(V), repeat=t)]
PLACES = [[PREFIXES.index(completion[:t]) for t in range(T)] for completion in COMPLETIONS]
"""[B, T], the prefix before each token."""


def table(seed: int) -> Tensor:
    """Logits of the next token after every prefix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(PREFIXES), V, generator=generator, dtype=torch.float64)


def sampled(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens of all completions, [B, T], and how probable each completion is, [B]."""
    logp_BT = logits.log_softmax(1)[torch.tensor(PLACES), torch.tensor(COMPLETIONS)]
    return logp_BT, logp_BT.detach().sum(1).exp()


def expected(student: Tensor, teacher: Tensor, forward: bool = False) -> Tensor:
    """Gradient of COEF times the sum over prefixes of KL(student || teacher) of the next token, or of KL(teacher ||
    student), each as often as the student, which is constant in this, gets there."""
    leaf = student.clone().requires_grad_()
    _, p_B = sampled(student)
    visits = torch.zeros(len(PREFIXES), dtype=torch.float64)
    for places, p in zip(PLACES, p_B, strict=True):
        visits[places] += p
    one, other = (teacher, leaf) if forward else (leaf, teacher)
    kl = (one.softmax(1) * (one.log_softmax(1) - other.log_softmax(1))).sum(1)
    (gradient,) = torch.autograd.grad(COEF * (visits * kl).sum(), leaf)
    return gradient


def test_advantages_have_the_gradient_of_the_divergence_on_average():
    student, teacher = table(0), table(1)
    leaf = student.clone().requires_grad_()
    logp_BT, p_B = sampled(leaf)
    advantages_BT = teacher_advantages(logp_BT.detach(), sampled(teacher)[0], COEF)
    weight_BT = p_B[:, None].expand(-1, T)
    loss, _ = policy_loss(logp_BT, logp_BT.detach(), advantages_BT, weight_BT, GrpoConfig(), beta=0.0)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert (gradient - expected(student, teacher)).abs().max() < 1e-12
    assert gradient.abs().max() > 0.01


@pytest.mark.parametrize("rows, forward", [(1, False), (7, False), (7, True)])
def test_the_loss_has_the_gradient_of_the_divergence_at_each_prefix(rows, forward):
    """A head whose hidden states are the prefixes, a few completions in a micro-batch."""
    student, teacher = table(0), table(1)
    leaf = student.clone().requires_grad_()
    _, p_B = sampled(student)
    prefix_ND, told = torch.eye(len(PREFIXES), dtype=torch.float64), teacher.log_softmax(1)
    loss = torch.zeros((), dtype=torch.float64)
    for first in range(0, len(COMPLETIONS), rows):
        places = torch.tensor(PLACES[first : first + rows])
        next_tokens = NextTokens(told[places.flatten()], None, V)
        given = prefix_ND[places.flatten()], leaf.T, None, LogitShape(), 1.0
        divergence = Divergence("forward_kl" if forward else "reverse_kl")
        (kl_N,) = head_divergence(*given, teacher=next_tokens, divergence=divergence)
        weight_bT = p_B[first : first + rows, None].expand(-1, T)
        loss = loss + teacher_loss(kl_N.view(-1, T), weight_bT, COEF)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert (gradient - expected(student, teacher, forward)).abs().max() < 1e-12


def test_a_clamp_limits_each_term():
    old_BT, teacher_BT = torch.tensor([[0.0, -1, -9, -1]]), torch.tensor([[-1.0, -3, -3, -1]])
    clamped = teacher_advantages(old_BT, teacher_BT, 0.5, clamp=2.0)
    assert clamped.tolist() == [[-0.5, -1.0, 1.0, 0.0]]
    value_bT = torch.tensor([[1.0, 3.0]], requires_grad=True)
    loss = teacher_loss(value_bT, torch.tensor([[0.5, 0.5]]), 2.0, clamp=2.0)
    assert loss.item() == 3.0 and torch.autograd.grad(loss, value_bT)[0].tolist() == [[1.0, 0.0]]


def taught(next_tokens):
    """A teacher that has read a rollout."""
    teacher = Teacher.__new__(Teacher)
    teacher._settings, teacher._next_tokens = TeacherConfig(model="m", into="loss", coef=0.5), next_tokens
    teacher._divergence = Divergence()
    return teacher


def test_the_numbers_are_means_over_real_tokens():
    mask_BT = torch.tensor([[True, True, True], [True, False, False]])
    old_BT, teacher_BT = torch.tensor([[-1.0, -2, -3], [-4, 9, 9]]), torch.tensor([[-2.0, -2, -2], [-1, 7, 7]])
    numbers = measure_teacher(old_BT, teacher_BT, mask_BT)
    assert {name: (float(value), int(count)) for name, (value, count) in numbers.items()} == {
        "teacher/logp": (-7 / 4, 4),
        "teacher/kl": (-10 / 4 + 7 / 4, 4),
    }
    teacher = taught({0: NextTokens(torch.zeros(1, 1), None, 1)})
    kl_BT = torch.where(mask_BT, torch.tensor([[1.0, 2, 3], [6, 0, 0]]), torch.nan)
    micro = SimpleNamespace(rows=[0], mask_bT=mask_BT)
    loss, seen = teacher.loss(SimpleNamespace(micro=micro, weight_bT=mask_BT / 4)).value(kl_BT, kl_BT, [kl_BT])
    assert float(loss) == 0.5 * 12 / 4 and float(seen["teacher/loss"][0]) == 3.0
    empty = SimpleNamespace(micro=micro, weight_bT=torch.zeros(2, 3))
    nothing, seen = teacher.loss(empty).value(kl_BT, kl_BT, [kl_BT])
    assert float(nothing) == 0.0 and float(seen["teacher/loss"][1]) == 0


def test_a_micro_batch_is_given_its_own_rows_in_their_order():
    """And one without rows, which a rank runs because another has more, a place of the same kind."""
    lengths, cpu = [2, 1, 3], torch.zeros(1, 1, dtype=torch.bool)
    places = torch.arange(6.0)[:, None].expand(6, 3)
    told = NextTokens(places.log_softmax(1), torch.arange(12, dtype=torch.int32).view(6, 2), 9).split(lengths)
    teacher = taught(dict(enumerate(told)))
    for rows, expected in (([2, 0], [3, 4, 5, 0, 1]), ([], [0])):
        batch: Any = SimpleNamespace(micro=SimpleNamespace(rows=rows, mask_bT=cpu))
        head: Any = teacher.loss(batch).head
        assert head.keywords["teacher"].token_NK[:, 0].tolist() == [2 * place for place in expected]
    assert taught({}).loss(batch) is None, "with teacher.into advantage"
