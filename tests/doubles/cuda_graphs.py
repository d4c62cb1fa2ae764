"""A double of CUDA graphs: it records the operations of a step, replays them at their addresses, and refuses what a
real capture or replay would not survive.

`Captures` stands in for `generation.graphs.on_cuda`. As on a GPU, capturing a step changes no memory but the graph's
own, a replay runs no Python, and numbers that Python computed during the capture stay as they were. The graph's own
memory is what its operations made; all other memory is held by weak references, so that a replay notices what its owner
has given back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"}
_SHAPES = {
    *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "unique_dim", "unique_consecutive"),
    *("_unique", "_unique2", "unique_dim_consecutive", "bincount"),
}
_READS = {
    *(torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.item),
    *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__),
}
"""Methods that read from the device; those of the CPU would not get as far as an operation."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class CaptureRefused(RuntimeError):
    """What CUDA raises when a stream that captures is given work that it cannot record."""


@dataclass(frozen=True)
class Outside:
    """A tensor in memory that is not the graph's."""

    storage: StorageWeakRef
    address: int
    layout: tuple[Any, ...]
    """Offset, shape and strides, and the type."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Outside":
        storage = tensor.untyped_storage()
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride()), tensor.dtype
        return cls(StorageWeakRef(storage), storage.data_ptr(), layout)

    def tensor(self) -> Tensor:
        """The tensor, if its memory is where it was."""
        storage = None if self.storage.expired() else torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "a replay uses memory that was given back after its capture"
        assert storage.data_ptr() == self.address, "a replay uses memory that has moved since its capture"
        (offset, shape, stride), dtype = self.layout
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


@dataclass
class Graph:
    """The operations of a step: functions, their arguments, and the graph's own tensors that they fill."""

    operations: list[tuple[Callable[..., Any], Any, Any, list[tuple[int, Tensor]]]] = field(default_factory=list)
    outside: list[Outside] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    """Single numbers from the host."""
    result: tuple[Tensor, ...] = ()
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1

        def real(leaf: Any) -> Any:
            return leaf.tensor() if isinstance(leaf, Outside) else leaf

        for function, args, kwargs, filled in self.operations:
            made = tree_leaves(function(*tree_map(real, args), **tree_map(real, kwargs)))
            for index, target in filled:
                target.copy_(made[index])


def _refuse(rule: bool, why: str) -> None:
    if rule:
        raise CaptureRefused(f"operation not permitted when stream is capturing: {why}")


class _NoReading(TorchFunctionMode):
    """Refuses methods that bring values to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(func in _READS, f"{getattr(func, '__name__', func)} waits for the device")
        return func(*args, **(kwargs or {}))


class _Recording(TorchDispatchMode):
    """Records every operation into `graph` and runs it, since later ones need shapes; `undo` takes back its effects."""

    current: "_Recording | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self._own: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> "_Recording":
        _Recording.current = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _Recording.current = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        _refuse(name in _WAITS, f"{func} waits for the device")
        counts = name == "repeat_interleave" and isinstance(args[-1], Tensor)
        _refuse(name in _SHAPES or counts, f"the shape of {func} depends on values")
        if name in _INDEXING:
            _refuse(any(i is not None and i.dtype == torch.bool for i in args[1]), f"{func} looks for a mask's places")
        if name == "lift_fresh":
            # A single number goes along with the launch; several are copied.
            _refuse(args[0].dim() > 0, "a copy from pageable host memory")
            self.graph.constants.append(func(*args))
            self._own.add(self.graph.constants[-1].untyped_storage()._cdata)
            return self.graph.constants[-1]
        written = {
            argument.name for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
        }
        positional = zip(func._schema.arguments, args, strict=False)
        named = {**{argument.name: value for argument, value in positional}, **kwargs}
        return self.record(func, args, kwargs, tree_leaves([named[name] for name in written if name in named]))

    def record(self, function: Callable[..., Any], args: Any, kwargs: Any, written: list[Any] = ()) -> Any:  # type: ignore[assignment]
        """Run an operation that writes to the tensors `written`, and append it to the graph."""
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._own and storage._cdata not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                self._before[storage._cdata] = whole, whole.clone()
        kept = [tree_map(self._kept, part) for part in (args, kwargs)]
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = function(*args, **kwargs)
        filled = []
        for index, tensor in enumerate(tree_leaves(out)):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._own.add(tensor.untyped_storage()._cdata)
                filled.append((index, tensor))
        # Views are not recorded: they are there already.
        if filled or written:
            self.graph.operations.append((function, *kept, filled))
        return out

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.untyped_storage()._cdata in self._own:
            return leaf
        self.graph.outside.append(Outside.of(leaf))
        return self.graph.outside[-1]

    def undo(self) -> None:
        """Take back what the operations wrote outside, and spoil what they made: a capture computes nothing."""
        for whole, before in self._before.values():
            whole.copy_(before)
        for *_, filled in self.graph.operations:
            for _, tensor in filled:
                tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.zero_()


def kernel(function: Callable[..., Any], *, writes: bool = False) -> Callable[..., Any]:
    """A function that stands in for one kernel, recorded as one operation. If it `writes`, it may write to any tensor
    that it is given, else to none."""

    def called(*args: Any, **kwargs: Any) -> Any:
        if _Recording.current is None:
            return function(*args, **kwargs)
        recording = _Recording.current
        # What is inside is not for the modes to see.
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            return recording.record(function, args, kwargs, tensors if writes else [])

    return called


class Captures:
    """Captures steps, and remembers their graphs."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []

    def __call__(
        self, step: Callable[[], tuple[Tensor, ...]], pool: Any = None
    ) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        """As `generation.graphs.on_cuda`."""
        with _Recording() as recording, _NoReading():
            result = step()
        recording.undo()
        graph = recording.graph
        del recording
        _refuse(any(tensor.storage.expired() for tensor in graph.outside), "memory is allocated outside the pool")
        graph.result = result
        self.graphs.append(graph)
        return graph.replay, result

    @property
    def forwards(self) -> list[int]:
        """Rows of the logits of captured forwards, in the order of the captures."""
        return [len(graph.result[0]) for graph in self.graphs if graph.result[0].dim() == 2]

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)
