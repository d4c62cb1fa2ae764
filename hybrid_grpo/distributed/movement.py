"""Whether an optimizer moves what it should: the weights whose gradient reaches it, and those that should have one.

It looks at the optimizer's own weights, float32 even if the model computes in bfloat16, and at Adam's first moment,
which is 0 as long as every gradient was. It cannot see a copy of the weights that does not follow them, a wrong
gradient, or, for an optimizer without first moments, anything. After a resumption, moments from before move a weight
for a while whose gradients no longer arrive.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.distributed import shards
from hybrid_grpo.distributed.ranks import reduced

_CHECKS = (1, 10, 100)
"""Optimizer steps after which weights are compared with those of the previous check."""
_LEARNS_BY = 10
"""Optimizer steps after which a gradient of 0 is no longer normal. A LoRA matrix A has none in the first."""
_SAMPLE = 64
_LEAST_MOMENT = 1e-8
"""Adam's epsilon: with less, a step is a small part of the learning rate, and may round away."""
_LEAST_STEP = 1 / 16
"""Part of the learning rate that must not round away where the first moment is largest."""
_MOVED, _LEARNED, _MUST_MOVE, _CALLED = range(4)
_INTEGERS = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True)
class UnchangedTensors:
    """Names of trained tensors that are as good as frozen."""

    still: Sequence[str] = ()
    """Tensors that have not moved although gradients reached the optimizer."""
    without_gradient: Sequence[str] = ()
    """Tensors of layers that computed, none of whose gradients was other than 0."""

    def __len__(self) -> int:
        return len(self.still) + len(self.without_gradient)

    def __str__(self) -> str:
        parts = (("not moved", self.still), ("zero gradient", self.without_gradient))
        return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)


class Movement:
    """Checks after 1, 10 and 100 optimizer steps with a gradient whether the weights of `module` move.

    Args:
        module: the module in training, sharded or not.
        optimizer, stage: DeepSpeed's optimizer of it, and its ZeRO stage.
        device: where collectives run.
    """

    def __init__(self, module: nn.Module, optimizer: Any, stage: int, device: torch.device) -> None:
        self._layout, self._device = (module, optimizer, stage), device
        self._names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._hooks: list[Any] = []
        self.restart()

    def restart(self) -> None:
        """Count optimizer steps from here, as after weights were loaded."""
        self._steps = 0
        self._before: dict[str, Tensor] = {}
        self._called: set[str] = set()
        self._unhook()
        for path, layer in self._layout[0].named_modules():
            if any(parameter.requires_grad for parameter in layer.parameters(recurse=False)):
                self._hooks.append(layer.register_forward_pre_hook(lambda *_, path=path: self._called.add(path)))

    def begin(self) -> None:
        if self._steps == 0:
            self._before = self._marks()

    def end(self, lr: float) -> UnchangedTensors | None:
        """After an optimizer step at learning rate `lr` that was applied, to a gradient that is not 0, return what has
        not moved since the last check; None if no check is due. Collective."""
        self._steps += 1
        if self._steps not in _CHECKS:
            return None
        marks = self._marks()
        found = reduced(self._seen(lr, marks), self._device, "max").bool()
        self._before = {} if self._steps == _CHECKS[-1] else marks
        if self._steps >= _LEARNS_BY:
            self._unhook()
        still = found[_MUST_MOVE] & ~found[_MOVED]
        # A gate's bias that only ranks experts has no gradient; the gate's weight has one.
        layers = [name.rpartition(".")[0] for name in self._names]
        learning = {layer for layer, learned in zip(layers, found[_LEARNED].tolist(), strict=True) if learned}
        idle = [bool(learning) and self._steps >= _LEARNS_BY and layer not in learning for layer in layers]
        without = found[_CALLED] & torch.tensor(idle)
        return UnchangedTensors(
            *([self._names[index] for index in which.nonzero().flatten()] for which in (still, without))
        )

    @torch.no_grad()
    def _marks(self) -> dict[str, Tensor]:
        """Return a checksum of this rank's part of each weight, and up to 64 evenly spaced elements, as integers."""
        return {name: _mark(weight) for name, weight, _ in shards.trained_pieces(*self._layout)}

    @torch.no_grad()
    def _seen(self, lr: float, marks: dict[str, Tensor]) -> Tensor:
        """Return for each weight by row, as this rank sees it: did it move, did a gradient other than 0 reach the
        optimizer, is there an element that must have moved, was its layer called? Float32 [4, weights]."""
        index = {name: number for number, name in enumerate(self._names)}
        rows = torch.zeros(4, len(self._names))
        for name, weight, moment in shards.trained_pieces(*self._layout):
            rows[_MOVED, index[name]] = float((marks[name] != self._before[name]).any())
            if moment is None:
                continue
            # Two passes over the moment, without a copy of it.
            ends = torch.stack([moment.argmin(), moment.argmax()])
            largest, at = moment[ends].abs().float().max(0)
            element = weight[ends[at]]
            shows = element - lr * _LEAST_STEP != element
            rows[_LEARNED, index[name]] = float(largest > 0)
            rows[_MUST_MOVE, index[name]] = float(shows & (largest > _LEAST_MOMENT))
        called = [name.rpartition(".")[0] in self._called for name in self._names]
        rows[_CALLED] = torch.tensor(called, dtype=torch.float32)
        return rows

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _mark(weight: Tensor) -> Tensor:
    # Two elements that change by opposite amounts leave the sum, which a sample of equal elements shows.
    bits = weight.view(_INTEGERS[weight.element_size()])
    sample = bits[:: -(-len(bits) // _SAMPLE)]
    return torch.cat([bits.sum(dtype=torch.int64)[None], sample])


def _listed(names: Sequence[str]) -> str:
    """Return names in a line: those that differ in numbers only, as of many layers, as one."""
    # The module in training wraps the model.
    shown = [name.removeprefix("model.") for name in names]
    counts = Counter(re.sub(r"\d+", "*", name) for name in shown)
    single = {pattern: name for name in shown if counts[pattern := re.sub(r"\d+", "*", name)] == 1}
    return ", ".join(single.get(pattern, f"{pattern} ({count})") for pattern, count in counts.items())
