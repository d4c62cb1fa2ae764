"""The policy as generation uses it: a plain module over the engine's weights.

A view is a second module of the same class with its own attention, but without hooks, gradients or storage. While it
is gathered, its parameters are the unsharded ("whole") weights. Below ZeRO stage 3, and on one rank, they are the
engine's own memory; otherwise slices of one buffer that the shards are gathered into. Adapters are merged into that
buffer, or into copies where the memory is the engine's own. The module in training is never touched, so there is
nothing to restore after generation.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.distributed import world_size
from hybrid_grpo.model.lora import Adapter


def meta_copy(model: Any, attn_implementation: str) -> nn.Module:
    """A module like a transformers model, on the meta device, with the given attention implementation."""
    config = deepcopy(model.config)
    with torch.device("meta"):
        copy: nn.Module = type(model)._from_config(config, attn_implementation=attn_implementation)
    return copy.requires_grad_(False)


class View:
    """A module whose parameters are the whole weights of another while they are gathered.

    Args:
        source: the module in training. If it is `sharded`, under ZeRO-3, its parameters may be empty.
        module: on the meta device; of the same class and structure as `source` without adapters.
        device: where whole weights go.
        adapters: the adapters in `source`, by the path of their layer in `module`.
    """

    def __init__(
        self,
        source: nn.Module,
        module: nn.Module,
        sharded: bool,
        device: torch.device,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.module, self._sharded, self._device = module, sharded, device
        self._adapters = adapters or {}
        # Typed as Any because DeepSpeed adds attributes to parameters under ZeRO-3.
        self._homes: dict[Any, list[tuple[nn.Module, str]]] = {}
        by_name = dict(source.named_parameters(remove_duplicate=False))
        for path, adapter in self._adapters.items():
            by_name.update({f"{path}.{name}": p for name, p in adapter.linear.named_parameters()})
        buffers = dict(source.named_buffers(remove_duplicate=False))
        for path, child in module.named_modules():
            prefix = f"{path}." if path else ""
            for name in child._parameters:
                if child._parameters[name] is not None:
                    # A tied weight is one parameter in several modules.
                    self._homes.setdefault(by_name[prefix + name], []).append((child, name))
            for name in child._buffers:
                child._buffers[name] = buffers.get(prefix + name)

    @torch.no_grad()
    def gather(self) -> None:
        """Give every parameter its whole weight. Collective when sharded over ranks."""
        matrices = [p for adapter in self._adapters.values() for p in (adapter.down, adapter.up)]
        whole = self.whole([*self._homes, *matrices])
        for adapter in self._adapters.values():
            weight = adapter.linear.weight
            whole[weight] = adapter.merged(
                whole[weight], whole[adapter.down], whole[adapter.up], in_place=self._sharded and world_size() > 1
            )
        for parameter, homes in self._homes.items():
            self._bind(homes, whole[parameter])

    @torch.no_grad()
    def whole(self, parameters: Iterable[Any]) -> dict[Any, Tensor]:
        """Whole weights of parameters in training, not to be written to. Collective when sharded over ranks."""
        if not self._sharded:
            return {p: p.data for p in parameters}
        if world_size() == 1:
            return {p: p.ds_tensor.to(self._device)[: p.ds_numel].view(p.ds_shape).detach() for p in parameters}
        return self._gather_shards(list(parameters))

    def release(self) -> None:
        """Drop the weights."""
        for parameter, homes in self._homes.items():
            self._bind(homes, torch.empty(0, dtype=parameter.dtype))

    @staticmethod
    def _bind(homes: list[tuple[nn.Module, str]], tensor: Tensor) -> None:
        bound = nn.Parameter(tensor, requires_grad=False)
        for module, name in homes:
            module._parameters[name] = bound

    def _gather_shards(self, every: list[Any]) -> dict[Any, Tensor]:
        """All-gather the shards, those of each dtype into one buffer."""
        whole: dict[Any, Tensor] = {}
        for dtype in sorted({p.ds_tensor.dtype for p in every}, key=str):
            parameters = [p for p in every if p.ds_tensor.dtype == dtype]
            sizes = [world_size() * p.ds_tensor.numel() for p in parameters]
            flat = torch.empty(sum(sizes), dtype=dtype, device=self._device)
            for p, target in zip(parameters, flat.split(sizes), strict=True):
                torch.distributed.all_gather_into_tensor(target, p.ds_tensor.to(self._device).view(-1))
                # The last ranks' shards may end in padding.
                whole[p] = target[: p.ds_numel].view(p.ds_shape)
        return whole
