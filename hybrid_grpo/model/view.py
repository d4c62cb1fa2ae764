"""The policy as generation uses it: a plain module over the engine's weights.

A view is a second module of the same class with its own attention, but without hooks, gradients or storage. While it
is gathered, its parameters are the unsharded ("whole") weights. Below ZeRO stage 3, and on one rank, they are the
engine's own memory; otherwise slices of one buffer that the shards are gathered into. Adapters are merged into that
buffer, or into copies of the engine's memory. A view may keep this memory, so that weights are at the same addresses
every time. The module in training is never touched, so there is nothing to restore after generation.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.model.lora import Adapter
from hybrid_grpo.model.ranks import world_size

_ALIGNED_BYTES = 128


def meta_copy(model: Any, attn_implementation: str) -> nn.Module:
    """Return a copy of a transformers model on the meta device, with the given attention implementation."""
    config = deepcopy(model.config)
    with torch.device("meta"):
        copy: nn.Module = type(model)._from_config(config, attn_implementation=attn_implementation)
    return copy.requires_grad_(False)


class View:
    """A module whose parameters, while gathered, are the whole weights of another module.

    Args:
        source: the module in training. If it is `sharded`, under ZeRO-3, its parameters may be empty.
        module: on the meta device; of the same class and structure as `source` without adapters.
        device: where the whole weights are.
        adapters: the adapters in `source`, by the path of their layer in `module`.
        keep: keep the memory of gathered and merged weights for the next `gather`.
    """

    def __init__(
        self,
        source: nn.Module,
        module: nn.Module,
        sharded: bool,
        device: torch.device,
        adapters: Mapping[str, Adapter] | None = None,
        keep: bool = False,
    ) -> None:
        self.module, self._sharded, self._device, self._keep = module, sharded, device, keep
        self._adapters = adapters or {}
        self._kept: dict[Any, Tensor] = {}
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
        every = [*self._homes, *matrices]
        whole = self._whole(every, self._memory)
        for adapter in self._adapters.values():
            weight = adapter.linear.weight
            out = whole[weight]
            if not self._copies(every):
                out = self._memory(weight, out.numel(), out.dtype).view(out.shape)
            whole[weight] = adapter.merged(whole[weight], whole[adapter.down], whole[adapter.up], out)
        for parameter, homes in self._homes.items():
            self._bind(homes, whole[parameter])

    @torch.no_grad()
    def whole(self, parameters: Iterable[Any]) -> dict[Any, Tensor]:
        """Return the whole weights of parameters in training, to be read only. Collective when sharded over ranks."""
        return self._whole(list(parameters), self._new)

    def release(self) -> None:
        for parameter, homes in self._homes.items():
            self._bind(homes, torch.empty(0, dtype=parameter.dtype))

    @staticmethod
    def _bind(homes: list[tuple[nn.Module, str]], tensor: Tensor) -> None:
        bound = nn.Parameter(tensor, requires_grad=False)
        for module, name in homes:
            module._parameters[name] = bound

    def _copies(self, every: list[Any]) -> bool:
        """Whether whole weights are copies of the engine's memory."""
        # Parameters that are offloaded are on the host.
        return self._sharded and (world_size() > 1 or any(p.ds_tensor.device != self._device for p in every))

    def _whole(self, every: list[Any], memory: Callable[[Any, int, torch.dtype], Tensor]) -> dict[Any, Tensor]:
        """Return the whole weights. If they are copies, all weights of one dtype are in one buffer from `memory`."""
        if not self._sharded:
            return {p: p.data for p in every}
        if not self._copies(every):
            return {p: _unpadded(p, p.ds_tensor.detach()) for p in every}
        whole: dict[Any, Tensor] = {}
        for dtype in sorted({p.ds_tensor.dtype for p in every}, key=str):
            parameters = [p for p in every if p.ds_tensor.dtype == dtype]
            sizes = [world_size() * p.ds_tensor.numel() for p in parameters]
            # Each weight begins where a kernel can load it fastest.
            unit = _ALIGNED_BYTES // dtype.itemsize
            places = [-(-size // unit) * unit for size in sizes]
            flat = memory(dtype, sum(places), dtype)
            for p, size, place in zip(parameters, sizes, flat.split(places), strict=True):
                target = place[:size]
                torch.distributed.all_gather_into_tensor(target, p.ds_tensor.to(self._device).view(-1))
                whole[p] = _unpadded(p, target)
        return whole

    def _new(self, _: Any, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)

    def _memory(self, what: Any, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory of `size` elements for `what`; every time the same memory if it is kept."""
        if not self._keep:
            return self._new(what, size, dtype)
        if what not in self._kept:
            self._kept[what] = self._new(what, size, dtype)
        return self._kept[what]


def _unpadded(parameter: Any, flat: Tensor) -> Tensor:
    """The whole weight of a sharded parameter, from its gathered shards, which may end in padding."""
    return flat.view(-1)[: parameter.ds_numel].view(parameter.ds_shape)
