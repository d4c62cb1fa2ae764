"""Reads rows from a hub dataset, a saved dataset, a folder of files, one file, or a Python object.

`prompts` and `pairs` interpret the columns of the rows.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hybrid_grpo.config import DataConfig, MixtureConfig
from hybrid_grpo.config.errors import UserError, refuse, type_of
from hybrid_grpo.config.held_out import HeldOut
from hybrid_grpo.config.sources import matching_files
from hybrid_grpo.data.row_files import READABLE, arrow_rows, file_rows, json_rows
from hybrid_grpo.data.row_shapes import shape_of
from hybrid_grpo.data.tasks import Row, load_task, make_rows, row_reader
from hybrid_grpo.model import hub


@dataclass(frozen=True)
class Source:
    """One split of one dataset, and the names of the settings that chose it."""

    path: Any
    """JSONL, JSON, CSV or parquet file, pattern of such files or folder of them, folder of a saved dataset, or hub
    name. In Python also a list of dicts, a `datasets.Dataset`, or a dict of datasets by split."""
    split: str | None = "train"
    """Name of a split, a slice such as `train[:90%]`, or None for the only split."""
    subset: str | None = None
    """Configuration name, for hub datasets and folders whose README declares configurations."""
    limit: int | None = None
    """Read only this many rows."""
    path_setting: str = "data.path"
    split_setting: str = "data.split"
    task: str | None = None
    """Name of a task. The task converts the rows, or makes them if `path` is empty."""
    lines: Iterable[bytes] | None = None
    """Lines of standard input, read instead of `path`."""
    text_column: str | None = None
    """Lines that do not begin with `{` are text for this column. Default: every line is JSON."""

    @property
    def origin(self) -> str:
        """Where the rows come from, as messages show it: the path, the type of the Python object, or the task."""
        if not isinstance(self.path, str):
            return type_of(self.path)
        return self.path or f"task {self.task}"

    @property
    def files(self) -> list[str]:
        """The local files that the path names, by itself or as a pattern; none if it names something else."""
        return matching_files(self.path) if isinstance(self.path, str) else []

    @property
    def folder(self) -> Path | None:
        """The local folder that paths in rows are relative to; None if there is none."""
        if self.files:
            return Path(self.files[0]).parent
        return Path(self.path) if isinstance(self.path, str) and Path(self.path).exists() else None

    def rows_of(self, files: Iterable[str]) -> Iterator[Row]:
        """Yield the rows of files, one file after the other."""
        for file in files:
            yield from file_rows(Path(file), self.path_setting)

    def __str__(self) -> str:
        name = self.origin if self.subset is None else f"{self.origin} ({self.subset})"
        return name if self.split is None else f"{name} [{self.split}]"


def training_source(config: DataConfig) -> Source:
    return Source(config.path, config.split, config.subset, config.limit, task=config.task)


def mixture_source(config: MixtureConfig) -> Source:
    setting = f"data.mixture {config.name}"
    return Source(
        config.path, config.split, config.subset, config.limit, f"{setting}: path", f"{setting}: split", config.task
    )


def evaluation_source(config: DataConfig) -> Source | None:
    """Return the source of held-out rows; None without `eval_path` and `eval_split`. `subset` is for `path` only."""
    held_out = replace(
        training_source(config), split=config.eval_split, limit=config.eval_limit, split_setting="data.eval_split"
    )
    if config.eval_path is not None:
        held_out = replace(held_out, path=config.eval_path, subset=None, path_setting="data.eval_path")
    elif config.eval_split is None:
        return None
    return held_out


def held_out_source(held_out: HeldOut) -> Source:
    rows, setting, task = held_out.rows, held_out.setting, held_out.data.task
    if rows is not None:
        return Source(rows.path, rows.split, rows.subset, rows.limit, f"{setting}.path", f"{setting}.split", task)
    source = evaluation_source(held_out.data)
    assert source is not None, "without rows of its own a set has those of the run"
    return source


def standard_input(lines: Iterable[bytes], setting: str, limit: int | None, text_column: str | None = None) -> Source:
    """Return a source of rows from a pipe, one JSON object per line; messages begin with `setting`."""
    return Source("standard input", None, limit=limit, path_setting=setting, lines=lines, text_column=text_column)


def read_rows(source: Source, config: DataConfig | None = None) -> list[Row]:
    """Return all rows of the source, in order. All rows have the same columns, with None for missing values. A task
    makes the rows or converts the rows of the source. Without one, rows of other projects are converted into ones with
    the columns that `config` names (see `shape_of`). Raises UserError if the source cannot be reached or read, has no
    such split or no rows, or a row cannot be converted."""
    if source.task is None or source.path != "":
        rows = _same_columns(_read(source))
    else:
        why = f"data.subset {source.subset}: data.task {source.task} has none: leave it out"
        refuse(source.subset is not None, why)
        rows = make_rows(source.task, source.split, source.limit, source.split_setting)
    if source.task is not None:
        convert = row_reader(load_task(source.task).row, f"data.task {source.task}", str(source))
    elif config is not None:
        convert = row_reader(shape_of(config, rows[0]), f"data.prompt_column {config.prompt_column}", str(source))
    else:
        return rows
    return _same_columns([convert(number, row) for number, row in enumerate(rows)])


def _same_columns(rows: list[Row]) -> list[Row]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [{column: row.get(column) for column in columns} for row in rows]


def _read(source: Source) -> list[Row]:
    try:
        rows = list(islice(_split_rows(source, open_source(source)), source.limit))
    except UserError:
        raise
    except ConnectionError as error:
        raise UserError(
            f"{source.path_setting} {source.path}: there is no such file or folder here, and"
            f" {hub.silence() or f'the hub cannot be reached ({one_line(error)}): check the network'}, or give a local"
            " file or folder"
        ) from error
    except Exception as error:
        datasets = sys.modules.get("datasets.exceptions")  # absent while it is not imported, which takes a second
        if not isinstance(error, (OSError, ValueError, RuntimeError, *([datasets.DatasetsError] if datasets else []))):
            raise
        takes_subset = source.path_setting == "data.path" and not source.files
        subset = f" (data.subset {source.subset or 'not set'})" if takes_subset else ""
        raise UserError(f"{source.path_setting} {source.origin}{subset} cannot be read: {one_line(error)}") from error
    refuse(not rows, f"{source.path_setting} {source} is empty: it has no rows")
    for number, row in enumerate(rows):
        refuse(not isinstance(row, dict), f"{source.path_setting}: row {number} (from 0) is {type_of(row)}: give dicts")
    return rows


def open_source(source: Source) -> Mapping[str, Iterable[Row]]:
    """Return the rows of each split, by name. A source without splits gets one split, `train`, as in `datasets`."""
    if source.lines is not None:
        rows = json_rows(source.lines, f"{source.path_setting} {source.path}", source.text_column)
        return {"train": (row for _, row in rows)}
    path = Path(source.path) if isinstance(source.path, str) else None
    is_saved = path is not None and any((path / file).is_file() for file in ("state.json", "dataset_dict.json"))
    refuse(
        source.subset is not None and (path is None or is_saved or bool(source.files)),
        f"data.subset {source.subset}: {source.path_setting} {source.origin} has no subsets: leave it out",
    )
    if path is None:
        return _named(source.path)
    if source.files:
        return {"train": source.rows_of(source.files)}
    import datasets

    if not path.exists():
        hub.silence()
        return _named(datasets.load_dataset(source.path, source.subset))
    if is_saved:
        try:
            return _named(datasets.load_from_disk(source.path))
        except IndexError as error:
            # An empty split is saved without a file, which `datasets` cannot load.
            raise UserError(
                f"{source.path_setting} {source.path} is empty, or has a split without rows: save it without that split"
            ) from error
    files = datasets.load_dataset_builder(source.path, source.subset).config.data_files
    known = {os.path.realpath(file) for paths in files.values() for file in paths}
    there = [file for file in matching_files(f"{source.path}/**") if Path(file).suffix.lower() in READABLE]
    ignored = {*datasets.data_files.FILES_TO_IGNORE}
    left = [file for file in there if os.path.realpath(file) not in known and os.path.basename(file) not in ignored]
    if left and os.environ.get("RANK", "0") == "0":
        told = f"{len(left)} of its {len(there)} files are not read, such as {left[0]}: a folder has one format, and"
        print(f"data: {source.path_setting} {source.path}: {told} its names say splits; try a pattern", file=sys.stderr)
    return {str(name): source.rows_of(paths) for name, paths in files.items()}


def _named(loaded: Any) -> Mapping[str, Iterable[Row]]:
    # A dataset keeps the output format with which it was saved; rows must be plain Python.
    plain = loaded.with_format(None) if hasattr(loaded, "with_format") else loaded
    splits = plain if isinstance(plain, Mapping) else {"train": plain}
    return {name: arrow_rows(rows) if hasattr(rows, "features") else rows for name, rows in splits.items()}


def _split_rows(source: Source, splits: Mapping[str, Iterable[Row]]) -> Iterable[Row]:
    """Return the rows of a split, or of slices of splits such as `train[:90%]` or `train[:100]+test[50%:]`."""
    split = source.split
    if split is None or split in splits or not re.search(r"[\[+]", split):
        return splits[split_name(source, split, list(splits))]
    from datasets import ReadInstruction

    try:
        instruction = ReadInstruction.from_spec(split)
    except ValueError as error:
        raise UserError(
            f"{source.split_setting} {split} is not a slice of a split ({one_line(error)}): write one as in train[:90%]"
            ", train[90%:] or train[100:200]"
        ) from error
    names = [re.sub(r"[\[(].*", "", part.strip()) for part in split.split("+")]
    tables = {name: list(splits[split_name(source, name, list(splits))]) for name in dict.fromkeys(names)}
    slices = instruction.to_absolute({name: len(table) for name, table in tables.items()})
    return chain.from_iterable(tables[part.splitname][part.from_ : part.to] for part in slices)


def split_name(source: Source, split: str | None, names: list[str]) -> str:
    if split in names:
        return split
    if split is None and len(names) == 1:
        return names[0]
    there_are = f"{source.path_setting} {source.origin} has {', '.join(names)}"
    if split is None:
        raise UserError(f"{source.split_setting} is not set, and {there_are}: choose one")
    way_out = f"set {source.split_setting} to {' or '.join(names)}"
    if source.split_setting == "data.eval_split" and len(names) == 1:
        held_out = "leave it out" if source.path_setting == "data.eval_path" else "give held-out rows in data.eval_path"
        way_out = f"{held_out}, or {way_out}"
    raise UserError(f"{source.split_setting} {source.split}: there is no such split, {there_are}: {way_out}")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
