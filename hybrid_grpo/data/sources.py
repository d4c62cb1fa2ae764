"""Where rows come from: a hub data set, a saved one, a folder of files, or one file.

Hands over rows as they are written; what a column means is for `prompts` and `pairs`. JSONL is read line by line
and not through Arrow: columns may mix text and messages, and a bad line is named by file and number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.data.tasks import Row, make_rows, map_rows

JSONL_SUFFIXES = {".jsonl", ".json", ".ndjson"}


@dataclass(frozen=True)
class Source:
    """One split of one data set, and the names of the settings that chose it."""

    path: str
    """JSONL or parquet file, folder of such files or of a saved data set, or hub name."""
    split: str | None = "train"
    """None takes the only split there is."""
    subset: str | None = None
    """Configuration name, of hub data sets and of folders whose README declares some."""
    limit: int | None = None
    """Read only this many rows."""
    path_setting: str = "data.path"
    split_setting: str = "data.split"
    task: str | None = None
    """Reads the rows, and makes them where there is no path."""

    @property
    def origin(self) -> str:
        """The path, or the task that makes the rows."""
        return self.path or f"task {self.task}"

    def __str__(self) -> str:
        name = self.origin if self.subset is None else f"{self.origin} ({self.subset})"
        return name if self.split is None else f"{name} [{self.split}]"


def training_source(config: DataConfig) -> Source:
    """The rows to train on."""
    return Source(config.path, config.split, config.subset, config.limit, task=config.task)


def evaluation_source(config: DataConfig) -> Source | None:
    """The held-out rows; None where neither `eval_path` nor `eval_split` is set. `subset` belongs to `path` alone."""
    if config.eval_path is not None:
        settings = {"path_setting": "data.eval_path", "split_setting": "data.eval_split"}
        return Source(config.eval_path, config.eval_split, limit=config.eval_limit, task=config.task, **settings)
    if config.eval_split is not None:
        place = (config.path, config.eval_split, config.subset, config.eval_limit)
        return Source(*place, split_setting="data.eval_split", task=config.task)
    return None


def read_rows(source: Source) -> list[Row]:
    """All rows of the source, in order, each with the same columns; a key that a JSONL line lacks is None.

    Of a task they are those that it makes of the rows of the source.

    Raises:
        UserError: the source cannot be reached or read, has no such split, or is empty; or the task cannot read a row.
    """
    if source.task is None:
        return _same_columns(_read(source))
    if not source.path:
        refuse(
            source.subset is not None, f"data.subset {source.subset}: data.task {source.task} has none: leave it out"
        )
        rows = make_rows(source.task, source.split, source.limit, source.split_setting)
    else:
        rows = _same_columns(_read(source))
    return _same_columns(map_rows(source.task, rows, str(source)))


def _same_columns(rows: list[Row]) -> list[Row]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [{column: row.get(column) for column in columns} for row in rows]


def _read(source: Source) -> list[Row]:
    from datasets.exceptions import DatasetsError

    try:
        splits = _open(source)
        rows = list(islice(splits[_split_name(source, list(splits))], source.limit))
    except UserError:
        raise
    except ConnectionError as error:
        raise UserError(
            f"{source.path_setting} {source.path}: there is no such file or folder here, and the hub cannot be"
            f" reached ({_one_line(error)}): check the network, or give a local file or folder"
        ) from error
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        takes_subset = source.path_setting == "data.path" and not Path(source.path).is_file()
        subset = f" (data.subset {source.subset or 'not set'})" if takes_subset else ""
        raise UserError(f"{source.path_setting} {source.path}{subset} cannot be read: {_one_line(error)}") from error
    if not rows:
        raise UserError(f"{source.path_setting} {source} is empty: it has no rows")
    return rows


def _open(source: Source) -> Mapping[str, Iterable[Row]]:
    """The splits by name; what has no splits is all `train`, as in `datasets`."""
    import datasets

    path = Path(source.path)
    if not path.exists():
        return _named(datasets.load_dataset(source.path, source.subset))
    saved = any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json"))
    if source.subset is not None and (saved or path.is_file()):
        raise UserError(f"data.subset {source.subset}: {source.path_setting} {path} has no subsets: leave it out")
    if saved:
        return _saved_splits(source)
    if path.is_file():
        return {"train": _file_rows([path], source)}
    files = datasets.load_dataset_builder(source.path, source.subset).config.data_files
    return {str(name): _file_rows([Path(file) for file in paths], source) for name, paths in files.items()}


def _saved_splits(source: Source) -> Mapping[str, Iterable[Row]]:
    import datasets

    try:
        return _named(datasets.load_from_disk(source.path))
    except IndexError as error:
        # A split without rows is saved without a file, and `datasets` does not load that.
        raise UserError(
            f"{source.path_setting} {source.path} is empty, or has a split without rows: save it without that split"
        ) from error


def _named(loaded: Any) -> Mapping[str, Iterable[Row]]:
    # A data set keeps the output format it was saved with; rows are plain Python.
    plain = loaded.with_format(None)
    return plain if isinstance(plain, Mapping) else {"train": plain}


def _split_name(source: Source, names: list[str]) -> str:
    if source.split in names:
        return source.split
    if source.split is None and len(names) == 1:
        return names[0]
    there_are = f"{source.path_setting} {source.path} has {', '.join(names)}"
    if source.split is None:
        raise UserError(f"{source.split_setting} is not set, and {there_are}: choose one")
    way_out = f"set {source.split_setting} to {' or '.join(names)}"
    if source.split_setting == "data.eval_split" and len(names) == 1:
        held_out = "leave it out" if source.path_setting == "data.eval_path" else "give held-out rows in data.eval_path"
        way_out = f"{held_out}, or {way_out}"
    raise UserError(f"{source.split_setting} {source.split}: there is no such split, {there_are}: {way_out}")


def _file_rows(paths: list[Path], source: Source) -> Iterator[Row]:
    for path in paths:
        if path.suffix in JSONL_SUFFIXES:
            yield from _jsonl_rows(path, source)
        elif path.suffix == ".parquet":
            yield from _parquet_rows(path)
        else:
            raise UserError(f"{source.path_setting} {path} is neither JSONL nor parquet: convert it to one of them")


def _jsonl_rows(path: Path, source: Source) -> Iterator[Row]:
    with path.open("rb") as lines:
        yield from (row for _, row in json_rows(lines, f"{source.path_setting} {path}"))


def json_rows(lines: Iterable[bytes], where: str) -> Iterator[tuple[int, Row]]:
    """The object of every line that is not blank, with the number of the line, from 1.

    Raises:
        UserError: a line is none; it names `where` and the number.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise UserError(f"{where} line {number} is not JSON ({error}): write one object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"{where} line {number} is a {type(row).__name__}: write one object a line")
        yield number, row


def _parquet_rows(path: Path) -> Iterator[Row]:
    import datasets
    from pyarrow.parquet import ParquetFile

    # Dataset decodes the column types that `datasets` adds to Arrow's (mixed JSON among them).
    with ParquetFile(path) as file:
        yield from datasets.Dataset(file.read())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
