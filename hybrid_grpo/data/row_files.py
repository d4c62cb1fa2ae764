"""Reads the rows of a file: JSON lines, an array of JSON objects, CSV or parquet.

JSON lines are read one by one, not through Arrow, so that a column may mix text and messages, and errors name the line.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hybrid_grpo.config.errors import UserError, refuse, type_of
from hybrid_grpo.data.tasks import Row

_JSON = {".jsonl", ".json", ".ndjson"}
READABLE = {*_JSON, ".parquet", ".csv", ".tsv"}
_PARQUET_ROWS = 1000
"""Number of rows of a parquet file that are decoded at a time."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_LONGEST_CELL = 1 << 30


def file_rows(path: Path, setting: str) -> Iterator[Row]:
    """Yield the rows of a file. Raises UserError, which begins with `setting`, if it is of another kind, or damaged."""
    where, kind = f"{setting} {path}", path.suffix.lower()
    with path.open("rb") as file:
        begin = file.read(80)
    refuse(begin.startswith(_POINTER), f"{where} is a Git LFS pointer in place of the file: run git lfs pull")
    if kind in _JSON and begin.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _array_rows(path.read_bytes(), where)
    elif kind in _JSON:
        with path.open("rb") as file:
            yield from (row for _, row in json_rows(file, where))
    elif kind == ".parquet":
        yield from _parquet_rows(path)
    elif kind in (".csv", ".tsv"):
        yield from _csv_rows(path, where)
    else:
        raise UserError(f"{where} is neither JSONL, a JSON array, CSV nor parquet: convert it to one of them")


def json_rows(lines: Iterable[bytes], where: str, text_column: str | None = None) -> Iterator[tuple[int, Row]]:
    """Yield the number of each non-blank line, counted from 1, and its JSON object. For `text_column` see `Source`.
    Raises UserError, which names `where` and the number, if a line is not an object."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8-sig")
            is_json = text_column is None or text.startswith("{")
            row = _parsed(text) if is_json else {str(text_column): text.rstrip("\r\n")}
        except (ValueError, RecursionError) as error:
            way_out = "write one object per line"
            if text_column is not None:
                way_out = f'write text that begins with {{ as {{"{text_column}": ...}}, all in UTF-8'
            raise UserError(f"{where} line {number} is not JSON ({error}): {way_out}") from error
        refuse(not isinstance(row, dict), f"{where} line {number} is {type_of(row)}: write one object per line")
        yield number, row


def _parsed(text: str) -> Any:
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises for one half of a surrogate pair
    return value


def _array_rows(file: bytes, where: str) -> list[Row]:
    try:
        rows: list[Row] = _parsed(file.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where} begins as an array and is not JSON ({error}): write an array of objects, or one object per line"
        ) from error
    return rows


def _csv_rows(path: Path, where: str) -> Iterator[Row]:
    """Yield the rows of a table whose first line names the columns. All cells are text."""
    csv.field_size_limit(_LONGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        separator = max(",;\t", key=file.readline().count)
        file.seek(0)
        reader = csv.DictReader(file, delimiter=separator, strict=True)
        try:
            for row in reader:
                refuse(
                    None in row,
                    f"{where} line {reader.line_num} has more cells than the first line has names: put cells that"
                    f" contain {separator!r} into quotes",
                )
                row.pop("", None)  # the index that pandas writes
                yield dict(row)
        except csv.Error as error:
            raise UserError(f"{where} line {reader.line_num} is not CSV ({error}): correct it") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    import datasets
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        for batch in file.iter_batches(_PARQUET_ROWS):
            # Dataset decodes the column types that `datasets` adds to Arrow, such as mixed JSON.
            yield from arrow_rows(datasets.Dataset(pyarrow.Table.from_batches([batch])))


def arrow_rows(dataset: Any) -> Iterator[Row]:
    """Yield the rows of a dataset, with pictures as the bytes or the path of a file. Arrow gives every structure in a
    column the keys of all of them, with None, and cannot tell it from a None that was given: below the messages of a
    chat, such keys are left out."""
    from datasets import Image, List

    kinds = dataset.features or {}
    for name, kind in kinds.items():
        if isinstance(kind, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(kind, List) and isinstance(kind.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    for row in dataset:
        yield {name: _unpadded(part, kinds.get(name)) if _is_chat(part) else part for name, part in row.items()}


def _is_chat(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and bool({"role", "from", "function"} & {*first})


def _unpadded(value: Any, kind: Any, level: int = 0) -> Any:
    """Return a value without the keys below its messages that are None. Types such as `Json` add none."""
    if isinstance(value, dict) and isinstance(kind, dict):
        parts = {key: part for key, part in value.items() if part is not None or level < 2}
        return {key: _unpadded(part, kind.get(key), level + 1) for key, part in parts.items()}
    if isinstance(value, list) and (inner := getattr(kind, "feature", None)) is not None:
        return [_unpadded(part, inner, level + 1) for part in value]
    return value
