"""Weights and optimizer states that are sharded over ranks, in files that any number of ranks can read.

Every rank writes one file: its flat tensors, and an index that locates each weight's elements in them. A reader takes
what it needs from the files of all ranks. So a checkpoint does not depend on the number of ranks, the ZeRO stage or
the offloading it was written with, and the padding of one layout never reaches another.

This module knows the attributes of DeepSpeed's optimizers and parameters; the engine decides when to read and write.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import astuple, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.distributed import tensor_files
from hybrid_grpo.distributed.ranks import rank, world_size

_POLICY, _STATE = "policy", "state"
_WEIGHT = "weight"
_STEP = "step"
"""Key of the number of optimizer steps; all other tensors in an optimizer's state are as long as the weights."""


@dataclass(frozen=True)
class _Piece:
    """Consecutive elements of a flattened weight inside a flat tensor."""

    name: str
    start: int
    """Index of the first element within the weight."""
    count: int
    at: int
    """Index of the first element within the flat tensor."""


@dataclass(frozen=True, eq=False)
class _Flat:
    """A flat tensor of this rank, and the pieces of weights in it. The optimizer's state is keyed by the tensor."""

    tensor: Any
    pieces: list[_Piece]


def save_optimizer(folder: Path, module: nn.Module, optimizer: Any, stage: int) -> None:
    """Write this rank's part of the trained weights and of the state of DeepSpeed's `optimizer` at ZeRO `stage`."""
    # At stage 0 all ranks hold the same.
    held = _optimizer_flats(module, optimizer, stage) if stage > 0 or rank() == 0 else []
    _write(folder, _POLICY, _shapes(module), held, _inner(optimizer, stage).state)


@torch.no_grad()
def load_optimizer(folder: Path, module: nn.Module, optimizer: Any, stage: int) -> None:
    """Read what `save_optimizer` wrote, on any number of ranks and at any stage. Raises UserError if a file or weight
    is missing, or the checkpoint belongs to another model. Collective."""
    saved = _Saved(folder, _POLICY, _shapes(module))
    with _changing(optimizer, stage):
        for flat in _optimizer_flats(module, optimizer, stage):
            saved.restore(flat, _inner(optimizer, stage))


def first_moments(module: nn.Module, optimizer: Any, stage: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of every trained weight and Adam's first moment of this rank's part of it, flat; nothing before
    the first step, and for an optimizer that has none."""
    states = _inner(optimizer, stage).state
    for flat in _optimizer_flats(module, optimizer, stage):
        moment = states.get(flat.tensor, {}).get("exp_avg")
        for piece in flat.pieces if moment is not None else ():
            yield piece.name, moment.view(-1)[piece.at : piece.at + piece.count]


class ParkedStates:
    """The float32 masters and the states of DeepSpeed's `optimizer` at ZeRO stage 2 or 3, which wait in pinned host
    memory until they are used. (DeepSpeed's own `offload_states` refuses torch's AdamW at stage 3.)"""

    def __init__(self, optimizer: Any, stage: int, device: torch.device) -> None:
        self._optimizer, self._stage, self._device = optimizer, stage, device
        self._host: dict[Tensor, Tensor] = {}
        self._park()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which the tensors are on the device; those copied to the host after it may still be moving."""
        for tensor in self._tensors():
            tensor.data = tensor.data.to(self._device, non_blocking=True)
        if self._stage == 2:
            self._optimizer._link_all_hp_params()
        yield
        self._park()

    def _park(self) -> None:
        if self._stage == 2:
            self._optimizer._clear_hp_buffer_references()  # views, for which what they show would stay on the device
        before, self._host, pins = self._host, {}, self._device.type == "cuda"
        for tensor in self._tensors():
            host = before[tensor] if tensor in before else torch.empty_like(tensor, device="cpu", pin_memory=pins)
            tensor.data = self._host[tensor] = host.copy_(tensor.data, non_blocking=True)

    def _tensors(self) -> Iterator[Tensor]:
        if self._stage == 3:
            weights = {id(flat) for flat in self._optimizer.fp16_partitioned_groups_flat}
            # In float32 the masters are the weights.
            yield from (flat for flat in self._optimizer.fp32_partitioned_groups_flat if id(flat) not in weights)
        else:
            yield from self._optimizer.single_partition_of_fp32_groups
        for state in self._optimizer.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


class GradientBuffers:
    """The buffers of gradients that ZeRO-3's `optimizer` has on a device, whose memory is free between steps."""

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        found = [optimizer.grad_partitions_flat_buffer, *(bucket.buffer for bucket in optimizer.ipg_buckets.values())]
        here = [buffer for buffer in found if buffer is not None and buffer.device == device]
        self._buffers = [(buffer, buffer.untyped_storage().nbytes()) for buffer in here]

    def free(self) -> None:
        for buffer, _ in self._buffers:
            buffer.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Give those that have none their memory, as zeros."""
        for buffer, size in self._buffers:
            if buffer.untyped_storage().nbytes() < size:
                buffer.untyped_storage().resize_(size)
                buffer.zero_()


@contextmanager
def _changing(optimizer: Any, stage: int) -> Iterator[None]:
    """A context in which the optimizer's tensors may be changed; on exit the weights follow them. Collective."""
    tensor_files.settle()
    if stage == 3:
        # No weight may stay gathered while its shards change.
        optimizer.checkpoint_event_prologue()
    yield
    if stage == 3:
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.checkpoint_event_epilogue()
    elif stage > 0:
        optimizer.update_lp_params()


@torch.no_grad()
def blend(module: Any, other: Any, stage: int, mix: float, averages: dict[str, Tensor]) -> None:
    """Set this rank's shards of a frozen module under ZeRO-3 to `mix` times the weights of another module, at ZeRO
    `stage`, plus (1 - `mix`) times their present values.

    Small steps are lost in bfloat16: 1 % of a difference of 5 % is below half a unit in a weight's last place. So
    `averages` holds the unrounded values, float32 in host memory, of weights that are not float32. Those that it lacks
    start from the weights; with `mix` 1, which is a copy, it is emptied.
    """
    tensor_files.settle()
    if mix == 1:
        averages.clear()
    others = dict(other.named_parameters())
    for flat in _module_flats(module):
        [piece] = flat.pieces
        weight, theirs = flat.tensor[: piece.count], others[piece.name]
        target = (theirs.ds_tensor if stage == 3 else theirs.data.view(-1)[piece.start :])[: piece.count]
        if mix < 1 and weight.dtype != torch.float32 and piece.name not in averages:
            averages[piece.name] = weight.to("cpu", torch.float32)
        average = averages.get(piece.name, weight)
        average.copy_(torch.lerp(average.float(), target.to(average.device, torch.float32), mix))
        weight.copy_(average)


def save_module(folder: Path, name: str, module: nn.Module, averages: Mapping[str, Tensor]) -> None:
    """Write this rank's shards of a frozen module under ZeRO-3; of some weights, the `averages` that were rounded."""
    flats = [_Flat(averages.get(flat.pieces[0].name, flat.tensor), flat.pieces) for flat in _module_flats(module)]
    _write(folder, name, _shapes(module, trained=False), flats, {})


@torch.no_grad()
def load_module(folder: Path, name: str, module: nn.Module) -> dict[str, Tensor]:
    """Read what `save_module` wrote, and return the averages in it; see `load_optimizer`."""
    saved, averages = _Saved(folder, name, _shapes(module, trained=False)), {}
    for flat in _module_flats(module):
        [piece] = flat.pieces
        shard = flat.tensor[: piece.count]
        if saved.dtype(piece.name) == torch.float32 != shard.dtype:
            averages[piece.name] = torch.empty_like(shard, dtype=torch.float32)
            saved.restore(_Flat(averages[piece.name], [piece]))
            shard.copy_(averages[piece.name])
        else:
            saved.restore(flat)
    return averages


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write this rank's `state`, which holds plain values and tensors."""
    tensor_files.write(deepcopy(state), _path(folder, _STATE, rank(), world_size()))


def load_state(folder: Path) -> dict[str, Any]:
    """Return what `save_state` wrote on this rank, or on rank 0 if the number of ranks has changed."""
    count = _ranks(folder, _STATE)
    return read_file(_path(folder, _STATE, rank() if count == world_size() else 0, count))


def _inner(optimizer: Any, stage: int) -> Any:
    return optimizer if stage == 0 else optimizer.optimizer


def _shapes(module: nn.Module, trained: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shapes of the trained weights, or of all weights if not `trained`, by name."""
    named: Iterable[tuple[str, Any]] = module.named_parameters()
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in named if p.requires_grad or not trained}


def _optimizer_flats(module: nn.Module, optimizer: Any, stage: int) -> list[_Flat]:
    names: dict[Any, str] = {p: name for name, p in module.named_parameters() if p.requires_grad}
    if stage == 0:
        return [_Flat(p, [_Piece(name, 0, p.numel(), 0)]) for p, name in names.items()]
    if stage == 3:
        groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        return [_Flat(flat, list(_sharded_pieces(group, names))) for flat, group in groups]
    if hasattr(optimizer, "bf16_groups"):
        # In bfloat16, stage 1 has its own optimizer class.
        flats, rows = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups
        starts = [[0, *accumulate(p.numel() for p in row)][:-1] for row in rows]
    else:
        flats, rows = optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups
        starts = optimizer.round_robin_bit16_offsets
    return [
        _Flat(flat, list(_row_pieces(row, places, flat.numel(), names)))
        for flat, row, places in zip(flats, rows, starts, strict=True)
    ]


def _module_flats(module: Any) -> list[_Flat]:
    flats = []
    for name, parameter in module.named_parameters():
        (piece,) = _sharded_pieces([parameter], {parameter: name})
        flats.append(_Flat(parameter.ds_tensor, [piece]))
    return flats


def _sharded_pieces(group: Iterable[Any], names: Mapping[Any, str]) -> Iterator[_Piece]:
    """Yield this rank's consecutive shards. They are equally large on all ranks; the last may be or end in padding."""
    at = 0
    for parameter in group:
        size = parameter.ds_tensor.ds_numel
        start = min(rank() * size, parameter.ds_numel)
        yield _Piece(names[parameter], start, min(size, parameter.ds_numel - start), at)
        at += size


def _row_pieces(row: Sequence[Any], starts: Sequence[int], size: int, names: Mapping[Any, str]) -> Iterator[_Piece]:
    """Yield this rank's pieces of a row of weights that begin at `starts`; each rank holds `size` elements."""
    first = rank() * size
    for parameter, start in zip(row, starts, strict=True):
        begin, end = max(start, first), min(start + parameter.numel(), first + size)
        if begin < end:
            yield _Piece(names[parameter], begin - start, end - begin, begin - first)


def _path(folder: Path, name: str, number: int, count: int) -> Path:
    return folder / f"{name}_{number:05d}_of_{count:05d}.pt"


def _ranks(folder: Path, name: str) -> int:
    """Return the number of ranks that wrote the files `name` in a folder; raises UserError if there are none."""
    file = next(folder.glob(f"{name}_*_of_*.pt"), None)
    if file is None:
        raise UserError(f"run.resume: {folder / name}: the checkpoint was made without it: remove its settings")
    return int(file.stem.rpartition("_")[2])


def _write(
    folder: Path, name: str, shapes: dict[str, tuple[int, ...]], flats: list[_Flat], states: Mapping[Any, Any]
) -> None:
    """Write this rank's file `name`: its `flats` of weights of these `shapes`, and their optimizer `states`."""
    content = []
    for flat in flats:
        state = states.get(flat.tensor, {})
        tensors = {key: value for key, value in state.items() if key != _STEP and isinstance(value, Tensor)}
        moments = {key: value for key, value in tensors.items() if value.shape == flat.tensor.shape}
        step = None if _STEP not in state else int(state[_STEP])
        pieces = [astuple(piece) for piece in flat.pieces]
        content.append({"pieces": pieces, "step": step, "tensors": {_WEIGHT: flat.tensor, **moments}})
    tensor_files.write({"shapes": shapes, "flats": content}, _path(folder, name, rank(), world_size()))


def read_file(path: Path) -> dict[str, Any]:
    """Return what a file of a checkpoint holds. Raises UserError if it is unreadable."""
    try:
        content: dict[str, Any] = tensor_files.read(path)
    except OSError as error:
        raise UserError(f"run.resume: {path} cannot be read: {error.strerror or error}") from error
    except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise UserError(
            f"run.resume: {path} cannot be read: it is damaged, or holds more than numbers and plain values"
        ) from error
    return content


@dataclass(frozen=True, eq=False)
class _SavedPiece:
    piece: _Piece
    step: int | None
    tensors: dict[str, Tensor]


class _Saved:
    """Everything that all ranks have written under a name; tensors are read from the files when they are copied.

    Raises UserError, on every rank, if files are missing, or do not hold exactly the weights of `shapes`.
    """

    def __init__(self, folder: Path, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        self._pieces: dict[str, list[_SavedPiece]] = {}
        count = _ranks(folder, name)
        for number in range(count):
            content = read_file(_path(folder, name, number, count))
            self._check(folder, content["shapes"], shapes)
            for flat in content["flats"]:
                for fields in flat["pieces"]:
                    piece = _Piece(*fields)
                    self._pieces.setdefault(piece.name, []).append(_SavedPiece(piece, flat["step"], flat["tensors"]))

    @staticmethod
    def _check(folder: Path, theirs: dict[str, tuple[int, ...]], ours: dict[str, tuple[int, ...]]) -> None:
        for weight in sorted(theirs.keys() | ours.keys()):
            saved, here = (list(shapes[weight]) if weight in shapes else "none" for shapes in (theirs, ours))
            if saved != here:
                raise UserError(
                    f"run.resume: checkpoint {folder} was made with another model or other adapters: its shape of"
                    f" {weight} is {saved}, here it is {here}"
                )

    def dtype(self, weight: str) -> torch.dtype:
        return self._pieces[weight][0].tensors[_WEIGHT].dtype

    def restore(self, flat: _Flat, optimizer: Any = None) -> None:
        """Copy the saved weights into a flat tensor, and their moments into an `optimizer`, but not into padding."""
        parts = [(piece, saved) for piece in flat.pieces for saved in self._pieces[piece.name]]
        moments = {key: saved.tensors[key].dtype for _, saved in parts for key in saved.tensors if key != _WEIGHT}
        steps = [saved.step for _, saved in parts if saved.step is not None]
        targets = {_WEIGHT: flat.tensor}
        if optimizer is not None and not moments:
            # Saved before the optimizer's first step, which makes the moments.
            optimizer.state.pop(flat.tensor, None)
        elif optimizer is not None:
            state = optimizer.state[flat.tensor]
            for key, dtype in moments.items():
                if key not in state:
                    state[key] = torch.empty_like(flat.tensor, dtype=dtype)
                targets[key] = state[key].zero_()
            if steps:
                # torch's optimizers count steps in a tensor, fused ones on the device; DeepSpeed's in a number.
                of_torch = type(optimizer).__module__.startswith("torch.")
                device = flat.tensor.device if optimizer.defaults.get("fused") else "cpu"
                state[_STEP] = torch.tensor(float(max(steps)), device=device) if of_torch else max(steps)
        for piece, saved in parts:
            _copy(piece, {key: target.view(-1) for key, target in targets.items()}, saved.piece, saved.tensors)


def _copy(here: _Piece, targets: Mapping[str, Tensor], there: _Piece, sources: Mapping[str, Tensor]) -> None:
    """Copy the elements that two pieces of the same weight have in common."""
    first = max(here.start, there.start)
    count = min(here.start + here.count, there.start + there.count) - first
    if count <= 0:
        return
    for key in targets.keys() & sources.keys():
        source = sources[key].reshape(-1).narrow(0, there.at + first - there.start, count)
        targets[key].narrow(0, here.at + first - here.start, count).copy_(source)
