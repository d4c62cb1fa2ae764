"""Finds trained layers that compute and that no gradient reaches, because something cuts the graph.

Adam's first moment is 0 as long as every gradient was. For an optimizer without one nothing is found; after a
resumption, moments from before hide for a while that gradients no longer arrive.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hybrid_grpo.distributed import shards
from hybrid_grpo.distributed.ranks import reduced

_AFTER = 10
"""Optimizer steps after which a gradient of 0 is no longer normal. A LoRA matrix A has none in the first."""


class GradientCheck:
    """Checks after 10 optimizer steps that a gradient has reached what is trained in `module`.

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
        self._steps, self._called = 0, set[str]()
        self._unhook()
        for path, layer in self._layout[0].named_modules():
            if any(parameter.requires_grad for parameter in layer.parameters(recurse=False)):
                self._hooks.append(layer.register_forward_pre_hook(lambda *_, path=path: self._called.add(path)))

    @torch.no_grad()
    def stepped(self) -> list[str]:
        """Count an optimizer step that was applied, to a gradient that is not 0. After the tenth, return the names of
        tensors in layers that computed and learn nothing; otherwise none. Collective."""
        self._steps += 1
        if self._steps != _AFTER:
            return []
        self._unhook()
        reached = dict.fromkeys(self._names, False)
        for name, moment in shards.first_moments(*self._layout):
            reached[name] = bool(moment.any())
        layers = [name.rpartition(".")[0] for name in self._names]
        seen = torch.tensor([[layer in self._called for layer in layers], list(reached.values())], dtype=torch.float32)
        called, learned = reduced(seen, self._device, "max").bool().tolist()
        # A gate's bias that only ranks experts has no gradient; the gate's weight has one.
        learning = {layer for layer, learns in zip(layers, learned, strict=True) if learns}
        idle = zip(self._names, layers, called, strict=True)
        return [name for name, layer, computes in idle if learning and computes and layer not in learning]

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def listed(names: Iterable[str]) -> str:
    """Return names of weights in a line: those that differ in numbers only, as of many layers, as one."""
    # The module in training wraps the model.
    shown = [name.removeprefix("model.") for name in names]
    counts = Counter(re.sub(r"\d+", "*", name) for name in shown)
    single = {pattern: name for name in shown if counts[pattern := re.sub(r"\d+", "*", name)] == 1}
    return ", ".join(single.get(pattern, f"{pattern} ({count})") for pattern, count in counts.items())
