"""Tensors that no gradient reaches: which are named, and which are rightly left alone."""

import pytest
import torch
from rank_threads import in_ranks
from torch import nn

from hybrid_grpo.distributed.gradients import GradientCheck, listed

WIDTH, STEPS = 4, 10


class Layers(nn.Module):
    """Three layers on a vocabulary of which only the first two tokens occur, a gate, an expert that gets no token, and
    a tower that text does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.expert, self.tower = nn.Embedding(1000, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.norm, self.gate, self.cut = nn.LayerNorm(WIDTH), Gate(), False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        x = x.detach() if self.cut else x
        return self.norm(x + self.gate(x)).pow(3).sum()


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias.detach()


class Run:
    """A module, its optimizer, and what watches them, as an engine at stage 0 has them."""

    def __init__(self, module: nn.Module, optimizer: type = torch.optim.AdamW) -> None:
        self.module = module
        self.optimizer = optimizer([p for p in module.parameters() if p.requires_grad], lr=1e-3)
        self.check = GradientCheck(module, self.optimizer, 0, torch.device("cpu"))

    def steps(self, count: int) -> dict[int, str]:
        """What is named, by the number of the step."""
        found = {}
        for number in range(1, count + 1):
            self.optimizer.zero_grad()
            self.module(torch.tensor([[0, 1]])).backward()
            self.optimizer.step()
            found |= {number: listed(names)} if (names := self.check.stepped()) else {}
        return found


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Layers()


def test_layers_that_no_gradient_reaches_are_named_once_they_should_have_had_one(module):
    """The expert and the tower do not compute, most of the vocabulary does not occur, and a bias of the gate only ranks
    experts. After a resumption steps count from there."""
    assert Run(module).steps(2 * STEPS) == {}
    module.cut, run = True, Run(module)
    assert run.steps(5) == {}
    run.check.restart()
    assert run.steps(2 * STEPS) == {STEPS: "embed.weight, layers.*.weight (2)"}


def test_nothing_is_said_where_no_loss_depends_on_anything_or_no_moment_is_known(module):
    assert Run(module, torch.optim.SGD).steps(STEPS) == {}
    for parameter in module.parameters():
        parameter.register_hook(torch.zeros_like)
    assert Run(module).steps(STEPS) == {}


def test_only_adapters_are_asked_of_a_model_with_adapters(module):
    """The first matrix of an adapter has no gradient in the first step, and the frozen weights never have one."""
    module.requires_grad_(False)
    down, up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
    nn.init.zeros_(up.weight)
    module.gate = nn.Sequential(down, up)
    assert Run(module).steps(STEPS) == {}
    down.weight.register_hook(torch.zeros_like)
    assert Run(module).steps(STEPS) == {STEPS: "gate.0.weight"}


def test_a_tensor_that_learns_on_one_rank_learns():
    """Each rank holds a part of a weight under ZeRO; here the graph of one is cut."""

    def program(rank: int) -> dict[int, str]:
        torch.manual_seed(0)
        module = Layers()
        module.cut = rank == 0
        return Run(module).steps(STEPS)

    assert in_ranks(2, program) == [{}, {}]
