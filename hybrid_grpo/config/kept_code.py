"""Copies of the user's files that a run keeps: commands on the run work in any folder, and after the files changed."""

import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

_NAMED = re.compile(r"(?P<file>[^\n]+\.py):[\w.]+")
"""A function as settings name it, `path/to/file.py:function`."""


def keep_code(settings: Any, folder: Path) -> None:
    """Copy the files that settings name, with what these import from beside them, into the folder `code` of a run."""

    def keep(file: str) -> str:
        source, copy = Path(file).expanduser().resolve(), _copy_of(file, folder)
        finder = ModuleFinder([str(source.parent)])
        try:
            finder.run_script(str(source))
        except (OSError, SyntaxError, UnicodeError):
            return file
        found = (getattr(module, "__file__", None) for module in finder.modules.values())
        for imported in {source, *map(Path, filter(None, found))}:
            target = copy.parent / imported.relative_to(source.parent)
            if imported.resolve() != target.resolve():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(imported, target)
        return file

    _with_files(settings, keep)


def with_kept_code(settings: Any, folder: Path) -> Any:
    """Return settings in which the files of which the run in `folder` keeps copies are replaced by these."""

    def kept(file: str) -> str:
        return str(copy) if (copy := _copy_of(file, folder)).is_file() else file

    return _with_files(settings, kept)


def _copy_of(file: str, folder: Path) -> Path:
    return folder / "code" / f"{Path(file).stem}_{zlib.crc32(file.encode()):08x}" / Path(file).name


def _with_files(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_files(part, change) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_files(part, change) for part in value]
    found = _NAMED.fullmatch(value) if isinstance(value, str) else None
    return f"{change(found['file'])}{value[found.end('file') :]}" if found else value
