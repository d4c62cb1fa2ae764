"""Finds out what a model caches of a token, with a forward in which a probe stands in for the cache."""

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.generation.cache import ForwardCache, Geometry, cached_forward
from hybrid_grpo.generation.state_pool import StateShape
from hybrid_grpo.model.eight_bits import Int8Linear, unpacked_sizes
from hybrid_grpo.model.ragged_attention import Options
from hybrid_grpo.model.routing import RoutingProbe, install_routers
from hybrid_grpo.model.runs import Runs

_PROBE_TOKENS = 67
"""Storages of a multiple of this are hardly any weights."""


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all live storages, except those of `known` tensors and of some `sizes`, and their peak since
    the last `mark`."""

    def __init__(self, known: Iterable[Tensor], sizes: Collection[int] = ()) -> None:
        super().__init__()
        self._sizes = sizes
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._seen and size not in self._sizes:
                self._seen.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, key, size)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size

    def mark(self) -> int:
        """Return the peak since the last mark, and set a new mark."""
        peak, self.peak = self.peak, self.live
        return peak


def geometry_of(model: Any) -> Geometry:
    """Measure a model with a forward of a few tokens, since architectures name these sizes differently. Raises
    UserError if a layer attends to keys and values that do not belong to the tokens of the forward."""
    install_routers(model)
    device = next(model.parameters()).device
    seen = _ShapeProbe(type(model).__name__, device)
    ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=device)
    # What is unpacked of a weight is not there when the other numbers are most.
    sizes, known = unpacked_sizes(model.base_model, Int8Linear), (*model.parameters(), *model.buffers(), ids)
    with torch.no_grad(), MemoryTracker(known, sizes) as tracker:
        cached_forward(model.base_model, ids, ids, seen)
    return Geometry(
        shapes=tuple(seen.shapes), dtype=seen.dtype, attention=tuple(seen.attention),
        reading=-(-tracker.peak // _PROBE_TOKENS), unpacked=max(unpacked_sizes(model)), shared=tuple(seen.layers),
        latents=seen.latents, states=tuple(seen.states), experts=seen.routes.shape,
    )  # fmt: skip


class _ShapeProbe(ForwardCache):
    """Stands in for a cache and records the shapes of the keys and values that a forward attends to."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.shapes: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self.attention: list[Options] = []
        self.layers: list[int] = []
        self.latents = False
        self.states: list[StateShape] = []
        self.dtype = torch.float32
        self.runs = Runs([(0, _PROBE_TOKENS)], [-1], device)
        self.routes = RoutingProbe()
        self._keys: list[weakref.ref[Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self._cached = key, value
        return key, value

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self, x: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        shape = x.shape[1], conv_kernel_size or x.shape[2]
        self.states.append(StateShape("conv", layer_idx, state_idx, shape, x.dtype))
        return x

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: object) -> Tensor:
        self.states.append(StateShape("recurrent", layer_idx, state_idx, tuple(state.shape[1:]), state.dtype))
        return state

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        if key.shape[2] != query.shape[2]:
            raise UserError(
                f"policy.model: {self.name} attends to other keys and values than those of its tokens:"
                " set rollout.decoder: transformers"
            )
        layer = next((layer for layer, known in enumerate(self._keys) if known() is key), len(self._keys))
        if layer == len(self._keys):
            self._keys.append(weakref.ref(key))
            self.shapes.append(((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3])))
        self.layers.append(layer)
        self.attention.append(options._replace(sinks=None))
        self.dtype = key.dtype
        n, heads, q, _ = query.shape
        return query.new_zeros(n, q, heads, value.shape[3])

    def attend_to_latents(self, query: Tensor, module: Any, options: Options) -> Tensor:
        latent, rotated = self._cached
        width = latent.shape[3] + rotated.shape[3]
        out = self.attend(query, latent, latent, options)
        assert self.layers[-1] == len(self.shapes) - 1 and self.latents == (len(self.shapes) > 1), (
            "all layers cache them"
        )
        self.latents, self.shapes[-1] = True, ((1, width), (1, 0))
        return out.new_zeros(*out.shape[:3], module.v_head_dim)
