"""The policy as generation uses it: a plain module over the engine's weights.

A view is a second module of the same class with its own attention, but without hooks, gradients or storage. While it
is gathered, its parameters are the unsharded ("whole") weights. Below ZeRO stage 3, and on one rank, they are the
engine's own memory; otherwise slices of one buffer that the shards are gathered into. Adapters are merged into that
buffer, or into copies of the engine's memory, unless the view calls the layers in training. Linear layers may instead
be copied in eight bits, one after the other. A view may keep this memory, so that weights are at the same addresses
every time. The module in training is never touched.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hybrid_grpo.distributed.ranks import world_size
from hybrid_grpo.model.eight_bits import Int8Linear, Int8Weight, eight_bit_layers, quantize, unpacked
from hybrid_grpo.model.lora import Adapter

Weights = Literal["merged", "unmerged", "int8"]

_ALIGNED_BYTES = 128
TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Linear modules on the same input, whose products a decode step computes as one if their weights are neighbors."""


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return neighbors in memory, [rows, ...] each, as one tensor without a copy; None if they are not neighbors."""
    first = parts[0]
    for before, part in pairwise(parts):
        same = before.untyped_storage()._cdata == part.untyped_storage()._cdata
        if not same or part.storage_offset() != before.storage_offset() + before.numel():
            return None
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def meta_copy(model: Any, attn_implementation: str) -> nn.Module:
    """Return a copy of a transformers model on the meta device, with the given attention implementation."""
    config = deepcopy(model.config)
    with torch.device("meta"):
        copy: nn.Module = type(model)._from_config(config, attn_implementation=attn_implementation)
    return copy.requires_grad_(False)


def whole_shape(parameter: Any) -> torch.Size:
    """Return the shape of a weight, which may be sharded or packed."""
    form = getattr(parameter, "quant_state", parameter)
    return torch.Size(getattr(form, "ds_shape", form.shape))


class View:
    """A module whose parameters, while gathered, are the whole weights of another module.

    Args:
        source: the module in training. If it is `sharded`, under ZeRO-3, its parameters may be empty.
        module: on the meta device; of the same class and structure as `source` without adapters.
        device: where the whole weights are.
        adapters: the adapters in `source`, by the path of their layer in `module`.
        keep: keep the memory of gathered and merged weights for the next `gather`.
        weights: `merged` merges adapters and unpacks packed weights; `unmerged` calls the layers of `source`,
            which is not `sharded`; `int8` has linear layers in eight bits, adapters merged before.
        neighbors: lay out the weights of `TOGETHER` as neighbors in memory where they are gathered or merged, and
            those of attention everywhere. Default: on GPUs.
    """

    def __init__(
        self, source: nn.Module, module: nn.Module, sharded: bool, device: torch.device,
        adapters: Mapping[str, Adapter] | None = None, keep: bool = False, neighbors: bool | None = None,
        weights: Weights = "merged",
    ) -> None:  # fmt: skip
        merge = weights != "unmerged"
        self.module, self._sharded, self._device, self.keeps = module, sharded, device, keep
        self._source, self._unmerged = source, None if merge else adapters or {}
        self._adapters = adapters or {} if merge else {}
        self._kept: dict[Any, Tensor] = {}
        self._away: dict[Any, Tensor] = {}  # packed weights of a GPU on the host, while they are gathered and not kept
        # Typed as Any because DeepSpeed adds attributes to parameters under ZeRO-3.
        self._homes: dict[Any, list[tuple[nn.Module, str]]] = {}
        by_name, parameters = dict(source.named_parameters(remove_duplicate=False)), {*source.parameters()}
        for path, adapter in self._adapters.items():
            by_name.update({f"{path}.{name}": p for name, p in adapter.linear.named_parameters()})
        buffers = dict(source.named_buffers(remove_duplicate=False))
        # The same weights in other modules, whose forwards may be replaced by some without gradients.
        shared = {id(of): of for p in parameters for of in (p, getattr(p, "quant_state", None))}
        for path in () if merge else [path for path, _ in module.named_modules()]:
            if path in (adapters or {}) or hasattr(by_name.get(f"{path}.weight"), "quant_state"):
                made = deepcopy(source.get_submodule(path), shared)
                if isinstance(made, Int8Linear):
                    vars(made).pop("forward", None)  # what training does at the head
                module.set_submodule(path, made)
        self._eight_bits: dict[Any, torch.Size] = {}
        """Shapes of the weights that are gathered in eight bits."""
        for parent, name, linear in eight_bit_layers(module) if weights == "int8" else ():
            made = Int8Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
            setattr(parent, name, made)
        for path, child in module.named_modules():
            if any(p in parameters for p in child._parameters.values()):
                continue  # a layer of the source, whose weights are in place
            prefix = f"{path}." if path else ""
            for name in child._parameters:
                if child._parameters[name] is not None:
                    # A tied weight is one parameter in several modules.
                    self._homes.setdefault(by_name[prefix + name], []).append((child, name))
                    if isinstance(child, Int8Linear) and name == "weight":
                        self._eight_bits[by_name[prefix + name]] = child.weight.shape
            for name in child._buffers:
                child._buffers[name] = buffers.get(prefix + name)
        self._changed = {adapter.linear.weight for adapter in self._adapters.values()}
        self._changed |= {p for p in self._homes if hasattr(p, "quant_state")}
        """Weights that are not the engine's own while gathered: adapted ones, and packed ones."""
        wanted = device.type == "cuda" if neighbors is None else neighbors
        self._together = [group for child in module.modules() for group in self._groups(child)] if wanted else []

    def _groups(self, child: nn.Module) -> list[list[Any]]:
        """Return the parameters of a module's children that are to be neighbors."""
        of_home: dict[Any, Any] = {(home, name): p for p, homes in self._homes.items() for home, name in homes}
        found = []
        for names in TOGETHER:
            parts = [getattr(child, name, None) for name in names]
            if {type(part) for part in parts} in ({nn.Linear}, {Int8Linear}):
                found += [[of_home.get((part, kind)) for part in parts] for kind in ("weight", "bias")]
        return [group for group in found if None not in group and group[0] not in self._eight_bits]

    @torch.no_grad()
    def gather(self, *, exact: bool = False) -> None:
        """Give every parameter its whole weight, none in eight bits if `exact`. Collective when sharded over ranks."""
        eight_bits = {} if exact else self._eight_bits
        matrices = [p for adapter in self._adapters.values() for p in (adapter.down, adapter.up)]
        every = [*(p for p in self._homes if p not in eight_bits), *matrices]
        memory = self._new if exact and self._eight_bits else self._memory
        whole = self._whole(every, memory)
        copies = self._copies(every)
        places = {} if copies else self._beside(whole)
        for weight in self._changed.difference(eight_bits):
            form = whole[weight]
            if weight not in places:
                places[weight] = form if copies else memory(weight, form.numel(), form.dtype).view(form.shape)
            if form.is_meta:
                whole[weight] = unpacked(weight, places[weight])
                if not self.keeps:
                    self._away[weight] = self._away[weight] if weight in self._away else weight.data.cpu()
                    weight.data = weight.data.new_empty(0)
        adapter_of = {adapter.linear.weight: adapter for adapter in self._adapters.values()}

        def merged(weight: Any, form: Tensor, out: Tensor) -> Tensor:
            adapter = adapter_of[weight]
            form, down, up = (x.to(self._device) for x in (form, whole[adapter.down], whole[adapter.up]))
            return adapter.merged(form, down, up, out)

        for weight in adapter_of.keys() - eight_bits.keys():
            whole[weight] = merged(weight, whole[weight], places[weight])
        codes = memory("codes", sum(shape.numel() for shape in eight_bits.values()), torch.int8)
        scales = memory("scales", sum(shape[0] for shape in eight_bits.values()), torch.float32)
        forms: dict[Any, tuple[Tensor, torch.dtype]] = {}
        for weight, shape in eight_bits.items():
            form = self._whole([weight], self._new)[weight]
            if weight in adapter_of:
                form = merged(weight, form, torch.empty(shape, dtype=form.dtype, device=self._device))
            whole[weight] = codes[: shape.numel()].view(shape)
            forms[weight] = scales[: shape[0]], weight.dtype
            quantize(form, whole[weight], scales[: shape[0]])
            codes, scales = codes[shape.numel() :], scales[shape[0] :]
        for parameter, homes in self._homes.items():
            self._bind(homes, whole[parameter], forms.get(parameter))

    def _beside(self, whole: dict[Any, Tensor]) -> dict[Any, Tensor]:
        """Copy weights that are to be neighbors side by side, unless they are; return where changed ones will be."""
        places: dict[Any, Tensor] = {}
        for group in self._together:
            changed = self._changed.intersection(group)
            # Queries, keys and values are a few percent of all weights, gate and up are half.
            if not changed and (len(group) < len(TOGETHER[0]) or joined([whole[p] for p in group]) is not None):
                continue
            sizes = [whole[p].numel() for p in group]
            flat = self._memory((group[0],), sum(sizes), whole[group[0]].dtype)
            for p, place in zip(group, flat.split(sizes), strict=True):
                place = place.view(whole[p].shape)
                if p in changed:
                    places[p] = place
                else:
                    whole[p] = place.copy_(whole[p])
        return places

    @torch.no_grad()
    def whole(self, parameters: Iterable[Any]) -> dict[Any, Tensor]:
        """Return the whole weights of parameters in training, to be read only. Collective when sharded over ranks."""
        return self._whole(list(parameters), self._new)

    def merged(self) -> nn.Module:
        """Return the gathered module with adapters merged: a copy in host memory if it calls them itself."""
        if self._unmerged is None:
            return self.module
        host = torch.device("cpu")
        view = View(self._source, meta_copy(self._source, "eager"), False, host, self._unmerged, keep=True)
        view.gather()
        return view.module

    def release(self) -> None:
        for parameter, homes in self._homes.items():
            self._bind(homes, torch.empty(0, dtype=parameter.dtype))
        for weight, packed in self._away.items():
            weight.data = packed.to(self._device)

    @staticmethod
    def _bind(
        homes: list[tuple[nn.Module, str]], tensor: Tensor, form: tuple[Tensor, torch.dtype] | None = None
    ) -> None:
        bound = nn.Parameter(tensor, requires_grad=False) if form is None else Int8Weight(tensor, *form)
        for module, name in homes:
            module._parameters[name] = bound

    def _copies(self, every: list[Any]) -> bool:
        """Whether whole weights are copies of the engine's memory."""
        # Parameters that are offloaded are on the host.
        away = self._sharded and (world_size() > 1 or any(p.ds_tensor.device != self._device for p in every))
        return away and not self._is_gathered(every)

    def _is_gathered(self, every: list[Any]) -> bool:
        """Whether the engine itself has gathered all weights of a small model; their addresses change."""
        return self._sharded and not self.keeps and all(p.ds_status.name == "AVAILABLE" for p in every)

    def _whole(self, every: list[Any], memory: Callable[[Any, int, torch.dtype], Tensor]) -> dict[Any, Tensor]:
        """Return the whole weights. If they are copies, all weights of one dtype are in one buffer from `memory`. A
        tensor on the meta device stands for a packed weight."""
        if not self._sharded or self._is_gathered(every):
            form = {p: p.quant_state for p in every if hasattr(p, "quant_state")}
            meta = {p: torch.empty(state.shape, dtype=state.dtype, device="meta") for p, state in form.items()}
            return {p: meta.get(p, p.data) for p in every}
        if not self._copies(every):
            return {p: _unpadded(p, p.ds_tensor.detach()) for p in every}
        whole: dict[Any, Tensor] = {}
        for dtype in sorted({p.ds_tensor.dtype for p in every}, key=str):
            places, size = self._places([p for p in every if p.ds_tensor.dtype == dtype])
            flat = memory(dtype, size, dtype)
            # In order: the padding after a weight lies where its neighbor's is gathered next.
            for p, begin in places.items():
                target = flat[begin : begin + world_size() * p.ds_tensor.numel()]
                torch.distributed.all_gather_into_tensor(target, p.ds_tensor.to(self._device).view(-1))
                whole[p] = _unpadded(p, target)
        return whole

    def _places(self, parameters: list[Any]) -> tuple[dict[Any, int], int]:
        """Return where in one buffer each weight begins, and the buffer's size. Each begins where a kernel can load it
        fastest, and right after the last one where they are to be neighbors and sizes allow it."""
        unit = _ALIGNED_BYTES // parameters[0].ds_tensor.element_size()
        before: dict[Any, Any] = {p: q for group in self._together for q, p in pairwise(group)}
        group_of = {p: group for group in self._together for p in group}
        members, places, end = set(parameters), dict[Any, int](), 0
        for parameter in parameters:
            for p in group_of.get(parameter, [parameter]):
                if p in places or p not in members:
                    continue
                begin, neighbor = -(-end // unit) * unit, before.get(p, p)
                if neighbor in places and neighbor.ds_numel % unit == 0:
                    begin = places[neighbor] + neighbor.ds_numel
                places[p] = begin
                end = max(end, begin + world_size() * p.ds_tensor.numel())
        return places, end

    def _new(self, _: Any, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)

    def _memory(self, what: Any, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory of `size` elements for `what`; every time the same memory if it is kept."""
        if not self.keeps:
            return self._new(what, size, dtype)
        if what not in self._kept:
            self._kept[what] = self._new(what, size, dtype)
        return self._kept[what]


def _unpadded(parameter: Any, flat: Tensor) -> Tensor:
    """The whole weight of a sharded parameter, from its gathered shards, which may end in padding."""
    return flat.view(-1)[: parameter.ds_numel].view(parameter.ds_shape)
