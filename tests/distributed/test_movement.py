"""Tensors that an optimizer does not move: which are named, and which are rightly left alone."""

import pytest
import torch
from rank_threads import in_ranks
from torch import nn

from hybrid_grpo.distributed.movement import Movement, UnchangedTensors

LR, WIDTH = 1e-3, 4


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

    def __init__(self, module: nn.Module, optimizer: type = torch.optim.AdamW, **settings: object) -> None:
        self.module = module
        trained = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = optimizer(trained, **{"lr": LR, "weight_decay": 0.0, **settings})
        self.movement = Movement(module, self.optimizer, 0, torch.device("cpu"))

    def step(self, lr: float = LR, undo: nn.Parameter | None = None) -> UnchangedTensors | None:
        kept = None if undo is None else undo.detach().clone()
        self.module(torch.tensor([[0, 1]])).backward()
        self.movement.begin()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if undo is not None:
            undo.data.copy_(kept)
        return self.movement.end(lr)

    def steps(self, count: int, **how: object) -> dict[int, str]:
        return {n: str(found) for n in range(1, count + 1) if (found := self.step(**how)) is not None}


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Layers()


def test_every_tensor_that_should_move_does_and_others_are_not_asked_to(module):
    """The expert and the tower do not compute, most of the vocabulary does not occur, and a bias of the gate only ranks
    experts. Looked at three times in a hundred steps."""
    assert Run(module).steps(101) == {1: "", 10: "", 100: ""}


@pytest.mark.parametrize("since", [1, 2, 11])
def test_a_tensor_that_the_optimizer_sees_and_does_not_move_is_named(module, since):
    run, expected = Run(module), {1: "", 10: "", 100: ""}
    name = "not moved: layers.1.weight"
    seen = {n: str(found) for n in range(1, 101)
            if (found := run.step(undo=module.layers[1].weight if n >= since else None)) is not None}  # fmt: skip
    assert seen == expected | {n: name for n in expected if n >= since}


def test_layers_that_no_gradient_reaches_are_named_once_they_should_have_had_one(module):
    module.cut = True
    found = Run(module).steps(10)
    assert found == {1: "", 10: "zero gradient: embed.weight, layers.*.weight (2)"}


def test_nothing_is_said_where_no_loss_depends_on_anything_or_no_moment_is_known(module):
    assert Run(module, torch.optim.SGD).steps(10) == {1: "", 10: ""}
    for parameter in module.parameters():
        parameter.register_hook(torch.zeros_like)
    assert Run(module).steps(10) == {1: "", 10: ""}


def test_only_adapters_are_asked_of_a_model_with_adapters(module):
    """The first matrix of an adapter has no gradient in the first step, and the frozen weights never move."""
    module.requires_grad_(False)
    down, up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
    nn.init.zeros_(up.weight)
    module.gate = nn.Sequential(down, up)
    run = Run(module)
    assert run.steps(1) == {1: ""} and run.optimizer.state[down.weight]["exp_avg"].count_nonzero() == 0
    assert [str(run.step(undo=down.weight)) for _ in range(9)][-1] == "not moved: gate.0.weight"


def test_an_update_below_the_precision_of_the_weights_is_no_fault(module):
    """During a long warm-up, norm weights of 1 do not move; their biases of 0 must."""
    run = Run(module, lr=1e-9)
    assert run.steps(1, lr=1e-9) == {1: ""} and bool((module.norm.weight == 1).all())
    assert Run(module, lr=1e-9).steps(1, lr=1e-9, undo=module.norm.bias) == {1: "not moved: norm.bias"}


def test_after_a_resumption_steps_count_from_there(module):
    run = Run(module)
    assert run.steps(5) == {1: ""}
    run.movement.restart()
    assert run.steps(10) == {1: "", 10: ""}


def test_equal_elements_that_move_apart_have_moved(module):
    """The checksum of a norm's weights, all 1, does not change if one rises and one falls by the smallest step."""
    run, ones = Run(module), torch.ones(2)
    run.movement.begin()
    run.module(torch.tensor([[0, 1]])).backward()
    run.optimizer.step()
    apart = ones.nextafter(torch.tensor([0.0, 2.0]))
    assert apart.view(torch.int32).sum() == ones.view(torch.int32).sum()
    module.norm.weight.data.fill_(1.0)[:2] = apart
    assert str(run.movement.end(LR)) == ""


def test_a_tensor_that_moves_on_one_rank_moves():
    """Each rank holds a part of a weight under ZeRO; here ranks see different tokens."""

    def program(rank: int) -> dict[int, str]:
        torch.manual_seed(0)
        run = Run(Layers())
        return run.steps(1, undo=run.module.layers[0].weight if rank == 0 else None)

    assert in_ranks(2, program) == [{1: ""}, {1: ""}]
