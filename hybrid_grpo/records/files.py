"""Files of a run: JSON that any reader takes, and text that no reader, and no crash, leaves half written."""

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

from hybrid_grpo.config.errors import UserError

_STEP = re.compile(rb'\{"step": ?(\d+)[,}]')


def replace_text(path: Path, text: str) -> None:
    """Write a file so that readers see the old text or the new one, and a crash leaves one of the two."""
    replace_bytes(path, text.encode("utf-8", errors="replace"))


def replace_bytes(path: Path, content: Any) -> None:
    """As `replace_text`, for a file that is not text."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync(path.parent)


def set_aside(path: Path) -> Path:
    """Rename a file or folder that is damaged, so that another can take its place; returns its new name."""
    return path.rename(_name_aside(path))


def _name_aside(path: Path) -> Path:
    number = 1
    while os.path.lexists(kept := path.with_name(f"damaged_{number}.{path.name}")):
        number += 1
    return kept


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, where a power cut leaves them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` a folder and all that it holds."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def cut_lines(path: Path, step: int) -> Path | None:
    """Cut a JSON-lines file after its lines up to a step, in place: at the first line that is of a later step, or not
    whole. Every line begins with its step. Where that line is not just the end of a file that a crash has cut, the file
    as it was is kept; returns its name."""
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


def rollout_files(folder: Path, kind: str = "jsonl") -> dict[int, Path]:
    """The rollouts saved in a folder, by step, in their order: their texts (`jsonl`) or their tokens (`parquet`). Other
    files, such as copies, are left out."""
    found = {path.stem.removeprefix("step_"): path for path in folder.glob(f"step_*.{kind}")}
    return {step: path for step, path in sorted((int(n), path) for n, path in found.items() if n.isdecimal())}


def json_safe(value: Any) -> Any:
    """`value` with everything that JSON cannot hold made into null (NaN, infinity) or text."""
    if isinstance(value, dict):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def as_json(value: Any, **options: Any) -> str:
    """`json_safe` of a value in JSON; nearly all values are safe as they are, and need no copy."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except (TypeError, ValueError):
        return json.dumps(json_safe(value), **options)


@contextmanager
def json_lines(name: str, setting: str) -> Iterator[Callable[[Any], None]]:
    """Writes values as JSON lines, each at once, into a file, anew, or to standard output (`-`).

    Raises UserError where the file that the setting names cannot be written.
    """
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


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Ends the block quietly when the reader of standard output has closed it."""
    try:
        yield
    except BrokenPipeError:
        # Buffered output would fail once more when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
