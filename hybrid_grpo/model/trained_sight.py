"""A tower that is trained with the text model.

Every rank has the whole tower, which reads the pictures of its own rows, so that no rank waits for the pictures of
another. The weights that the optimizer changes are a second copy, inside the engine and sharded as the rest there.

In training, the embeddings of a picture are a leaf of the graph, once for all micro-batches of an optimizer step.
Before the engine steps, the tower reads each picture again and carries the gradient of its embeddings to the weights.
The sum over pictures goes into the engine as the gradient of a linear function of the weights, in which no module of
the tower is called, and thus no collective depends on pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.config import LoraConfig
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.lora import Adapter, Adapters
from hybrid_grpo.model.sight import ImageEmbedding, Pixels, VisionEncoder
from hybrid_grpo.model.towers import text_of


class TowerWeights(nn.Module):
    """Copies of a tower's trained weights, for the engine."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        for name, tensor in named:
            self.register_parameter(name.replace(".", "/"), nn.Parameter(tensor.detach().clone()))

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return a number whose gradient in each weight is the one given, float32. Collective under ZeRO-3."""
        pairs = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def _require_gradient(module: nn.Module, inputs: Any, embeds: Tensor) -> None:
    if torch.is_grad_enabled():
        embeds.requires_grad_()


class SeeingModel(LogprobModel):
    """A causal language model with the weights of its tower. Its forward is that of `LogprobModel` or, for a list of
    gradients, that of `TowerWeights`."""

    def __init__(self, model: Any, vocabulary: int | None, tower: TowerWeights) -> None:
        super().__init__(model, vocabulary)
        self.tower = tower
        # Where weights are frozen under adapters, gradients go back to the embeddings on ranks with pictures. They must
        # on all ranks, which gather the weights of the layers on the way together.
        text_of(model).get_input_embeddings().register_forward_hook(_require_gradient)

    def forward(self, *args: Any) -> Any:
        return self.tower(args[0]) if isinstance(args[0], list) else super().forward(*args)


class TrainedVisionEncoder(VisionEncoder):
    """The tower of a policy, trained: its weights or, with a `lora` of rank above 0, adapters of its linear layers.

    Trained are the weights that gradients from a picture reach; a tower may have others, as those for sounds.

    Args:
        tower, pixels, cache_bytes: as for `VisionEncoder`.
        blank: what the tower takes of some picture.
        lora, seed: see `Adapters`.

    Attributes:
        weights: the weights that the engine trains.
        adapters: the adapters of the tower; None if its weights are trained.
    """

    def __init__(
        self,
        tower: Any,
        pixels: Pixels,
        cache_bytes: int,
        blank: Mapping[str, Tensor],
        lora: LoraConfig | None,
        seed: int,
    ) -> None:
        super().__init__(tower, pixels, torch.device("cpu"), cache_bytes)
        self.adapters = Adapters(tower, lora, seed) if lora is not None and lora.rank else None
        if self.adapters is None:
            tower.requires_grad_(True)
        named = {name: weight for name, weight in tower.named_parameters() if weight.requires_grad}
        read = self.read(blank)
        parts = [part.sum() for part in (read.rows_ND, *read.deep)]
        found = torch.autograd.grad(parts, list(named.values()), allow_unused=True)
        reached = [name for name, gradient in zip(named, found, strict=True) if gradient is not None]
        tower.requires_grad_(False)
        self._trained = {name: named[name].requires_grad_() for name in reached}
        self.weights = TowerWeights(self._trained.items())
        self._leaves: dict[int, ImageEmbedding] = {}

    def embeddings(self, key: int) -> ImageEmbedding:
        """Return what a forward puts in the place of a picture: in training, leaves that collect its gradient."""
        look = self.look(key)
        if not torch.is_grad_enabled():
            return look
        if key not in self._leaves:
            parts = [part.to(self.device, torch.float32).requires_grad_() for part in (look.rows_ND, *look.deep)]
            self._leaves[key] = ImageEmbedding(parts[0], tuple(parts[1:]))
        return self._leaves[key]

    def gradients(self) -> list[Tensor]:
        """Return the gradient of each of `weights` on this rank, float32, since the last call: it follows from those
        that pictures' embeddings have collected."""
        weights = list(self._trained.values())
        total = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        for key, leaf in self._leaves.items():
            with torch.enable_grad():
                read = self.read(self._pixels(key))
            pairs = zip((read.rows_ND, *read.deep), (leaf.rows_ND, *leaf.deep), strict=True)
            reached = [(part, of.grad.to(part.dtype)) for part, of in pairs if of.grad is not None]
            if reached:
                parts, collected = zip(*reached, strict=True)
                found = torch.autograd.grad(parts, weights, collected, allow_unused=True)
                for into, gradient in zip(total, found, strict=True):
                    if gradient is not None:
                        into.add_(gradient)
        self._leaves.clear()
        return total

    @torch.no_grad()
    def follow(self, whole: Mapping[nn.Parameter, Tensor]) -> None:
        """Give the tower new weights; `whole` maps each parameter of `weights` to its unsharded weight."""
        for own, source in zip(self._trained.values(), self.weights.parameters(), strict=True):
            own.copy_(whole[source])
        self._leaves.clear()
        self.forget()

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Return the weights that training changes by their names in the whole model, adapters merged."""
        if self.adapters is None:
            return {name: weight.detach() for name, weight in self._trained.items()}

        def merged(adapter: Adapter) -> Tensor:
            weight = adapter.linear.weight
            return adapter.merged(weight, adapter.down, adapter.up, torch.empty_like(weight))

        return {f"{path}.weight": merged(adapter) for path, adapter in self.adapters.by_layer.items()}
