"""Writes a run's files atomically, so that readers see the old or the new content, and as valid JSON."""

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

TRACE_FILE = "details.jsonl"
"""Name of the file in a run's folder with the traces of its steps, one JSON object per step."""
_STEP = re.compile(rb'\{"step": ?(\d+)[,}]')


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers, even after a crash, see the old or the new text."""
    replace_bytes(path, text.encode("utf-8", errors="replace"))


def replace_bytes(path: Path, content: Any) -> None:
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync(path.parent)


def set_aside(path: Path, why: str = "damaged") -> Path:
    """Rename a file or folder, so that a new one can take its place, and return its new path."""
    return path.rename(_name_aside(path, why))


def _name_aside(path: Path, why: str = "damaged") -> Path:
    number = 1
    while os.path.lexists(kept := path.with_name(f"{why}_{number}.{path.name}")):
        number += 1
    return kept


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def cut_lines(path: Path, step: int) -> Path | None:
    """Truncate a file of JSON lines, each of which begins with its step, before the first line that is incomplete,
    damaged, or later than `step`. If that line is damaged, copy the file first and return the path of the copy."""
    if not path.exists():
        return None
    with path.open("r+b") as file:
        end, kept = 0, None
        for line in file:
            found = _STEP.match(line) if line.endswith(b"}\n") else None
            if found is None and line.endswith(b"\n"):
                kept = Path(shutil.copyfile(path, _name_aside(path)))
            if found is None or int(found[1]) > step:
                break
            end += len(line)
        file.truncate(end)
    return kept


def replace_folder(target: Path, draft: Path, old: Path) -> None:
    """Rename `target` to `old`, if it exists, and then `draft` to `target`; if that fails, rename `old` back."""
    replaces = target.exists()
    if replaces:
        target.rename(old)
    try:
        draft.rename(target)
    except OSError:
        if replaces:
            old.rename(target)
        raise
    sync(target.absolute().parent)


def rollout_files(folder: Path, kind: str = "jsonl") -> dict[int, Path]:
    """Return the rollout files in a folder by ascending step: texts (`kind` is `jsonl`) or tokens (`parquet`)."""
    expression = re.compile(rf"step_(\d{{1,15}})\.{kind}")
    try:
        names = os.listdir(folder)
    except OSError:
        names = []
    matches = (expression.fullmatch(name) for name in sorted(names))
    return dict(sorted((int(match[1]), folder / match[0]) for match in matches if match))


def flattened(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield nested settings as dotted names, and their values."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from ((f"{name}.{below}", of) for below, of in flattened(value))
        else:
            yield str(name), value


def json_safe(value: Any) -> Any:
    """Return `value` with None in place of NaN and infinity, and text in place of other values that JSON lacks."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def as_json(value: Any, **options: Any) -> str:
    """Return a value as JSON. `json_safe` converts the value only if necessary, because it makes a copy."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except (TypeError, ValueError):
        return json.dumps(json_safe(value), **options)


@contextmanager
def json_lines(name: str, setting: str) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes a value as a JSON line and flushes it, to a new file or to standard output (`-`).

    Raise UserError, which names `setting`, if the file cannot be opened.
    """
    from hybrid_grpo.config.errors import UserError  # only here: the settings take long to load

    with ExitStack() as stack:
        try:
            file = sys.stdout.buffer if name == "-" else stack.enter_context(Path(name).open("wb"))
        except OSError as error:
            raise UserError(f"{setting} {name} cannot be written: {error.strerror}") from error

        def write(value: Any) -> None:
            line = as_json(value, ensure_ascii=False)
            file.write(line.encode("utf-8", errors="replace") + b"\n")
            file.flush()

        yield write
