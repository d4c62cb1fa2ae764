"""Reads what wandb has written offline: a `.wandb` file, a log of protobuf records in blocks as LevelDB's."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as proto

_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(folder: Path) -> list[Any]:
    """All records of the newest offline run in the folder `wandb` of a run."""
    file = next((folder / "wandb" / "latest-run").glob("*.wandb"))
    return [proto.Record.FromString(data) for data in _chunks(file.read_bytes())]


def _chunks(data: bytes) -> Iterator[bytes]:
    place, parts = _FILE_HEADER, b""
    while place + _HEADER.size <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER.size:
            place += left
            continue
        _, length, kind = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        parts += data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""


def of_kind(found: list[Any], kind: str) -> list[Any]:
    """The records of one kind: run, history, metric, alert, artifact, ..."""
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def items(record: Any) -> dict[str, Any]:
    """The values of a history or summary record by name, nested names with dots between."""
    found = record.update if isinstance(record, proto.SummaryRecord) else record.item
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in found}
