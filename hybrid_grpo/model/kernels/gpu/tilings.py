"""How many programs share the work of a decode step on a GPU: as it was measured, or else as it has room for."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hybrid_grpo.model.kernels.build import cache


class Tiling(NamedTuple):
    """Numbers for one kind of GPU. The defaults were measured on an H200."""

    few: int = 256
    """Programs of attention, of equal work, that end soonest with two tiles on their way."""
    many: int = 512
    """With one tile on its way; where sequences are many, twice as many share their entries."""
    products: int = 256
    """Programs that keep it busy with products of few rows."""
    most_rows: int = 32
    """Most rows that our products multiply by plain weights; torch's have larger tiles."""


_SHIPPED = {"9.0/132": Tiling()}
_OF_PROGRAM = 100 << 10
"""Bytes of a multiprocessor's shared memory for each program with two tiles on their way."""
_known: dict[torch.device, Tiling] = {}


def file() -> Path:
    """Return where `hybrid-grpo tune` writes what it has measured, by `name_of`."""
    return cache() / "tilings.json"


def name_of(card: Any) -> str:
    """Return a GPU's compute capability and number of multiprocessors, as in 9.0/132."""
    return f"{card.major}.{card.minor}/{card.multi_processor_count}"


def tiling_of(device: torch.device) -> Tiling:
    """Return the tiling of a GPU (for another device, an H200's): measured here or shipped, else `modelled`."""
    if device not in _known:
        use(device, _tiling(torch.cuda.get_device_properties(device)) if device.type == "cuda" else Tiling())
    return _known[device]


def use(device: torch.device, tiling: Tiling) -> None:
    _known[device] = tiling


def _tiling(card: Any) -> Tiling:
    try:
        return Tiling(**json.loads(file().read_text())[name_of(card)])
    except (OSError, ValueError, KeyError, TypeError):
        return _SHIPPED.get(name_of(card)) or modelled(card)


def modelled(card: Any) -> Tiling:
    """Return the tiling of a GPU that nobody has measured, whose memory is as busy as an H200's."""
    few = card.multi_processor_count * max(1, card.shared_memory_per_multiprocessor // _OF_PROGRAM)
    return Tiling(few, 2 * few, 2 * card.multi_processor_count)
