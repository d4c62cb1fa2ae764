"""Copies of the user's files that a run keeps: commands on the run work in any folder, and after the files changed."""

import ast
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_NAMED = re.compile(r"(?P<file>[^\n]+\.py):[\w.]+")
"""A function as settings name it, `path/to/file.py:function`."""


def keep_code(settings: Any, folder: Path) -> None:
    """Copy the files that settings name, with what these import from beside them, into the folder `code` of a run."""

    def keep(file: str) -> str:
        source, copy = Path(file).expanduser().resolve(), _copy_of(file, folder)
        for module in _with_imports(source):
            target = copy.parent / module.relative_to(source.parent)
            if module != target.resolve():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(module, target)
        return file

    _with_files(settings, keep)


def _with_imports(source: Path) -> set[Path]:
    """Return a file and the modules and packages beside it that it imports, also through each other."""
    found, rest = set[Path](), [source]
    while rest:
        file = rest.pop()
        if file in found or not file.is_file():
            continue
        found.add(file)
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        except (OSError, SyntaxError, ValueError):
            continue
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        for name in {name.partition(".")[0] for name in names} - {"", "hybrid_grpo"}:
            package = source.parent / name
            modules = package.rglob("*.py") if (package / "__init__.py").is_file() else ()
            rest += [package.with_suffix(".py"), *modules]
    return found


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
