"""Imports the user's code, named as `path/to/file.py:name` or `package.module:name`."""

import importlib
import inspect
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hybrid_grpo.config.errors import UserError, did_you_mean, refuse

_LONGEST_MESSAGE = 2_000  # characters: some functions put a whole completion into theirs


HIDDEN_VARIABLES = "HYBRID_GRPO_HIDDEN"
"""Environment variable of worker processes that names the variables hidden from them, separated by commas."""


def import_place(place: str, setting: str) -> ModuleType:
    """Import a file or a dotted module name, once, and return the module. Raises UserError if it does not exist or
    importing it raises; the message begins with `setting`."""
    is_file = place.endswith(".py") or "/" in place
    path = Path(place).expanduser().resolve()
    if is_file and not path.is_file():
        raise UserError(f"{setting}: there is no file {path}")
    try:
        if is_file:
            return _import_file(path)
        with _first_on_path(Path.cwd()):  # as with `python -m`; a console script has another path
            return importlib.import_module(place)
    except Exception as error:
        absent = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if not is_file and absent and f"{place}.".startswith(f"{absent}."):
            raise UserError(
                f"{setting}: there is no module {absent}: install it, or give the file as path/to/file.py:name"
            ) from error
        raise UserError(f"{setting}: importing {place} raised {describe(error, str(path))}") from error


def import_object(given: str, setting: str) -> Any:
    """Import the object that `path/to/file.py:name` or `package.module:name` names. Raises UserError if it does not
    exist or cannot be called; the message begins with `setting`."""
    place, colon, name = given.rpartition(":")
    refuse_bare_file(given, setting, _is_callable)
    refuse(not colon, f"{setting}: give path/to/file.py:name or package.module:name")
    module = import_place(place, setting)
    found = getattr(module, name, None)
    known = did_you_mean(name, functions_of(module, _is_callable))
    refuse(not callable(found), f"{setting}: {place} has no function {name}: {known}")
    return found


def refuse_bare_file(given: str, setting: str, kinds: Callable[[Any], bool] = inspect.isfunction) -> None:
    """Refuse a file without the name of a function or of an object that `kinds` accepts, and say which it has."""
    if given.endswith(".py"):
        names = functions_of(import_place(given, setting), kinds) or ["name"]
        others = f", or {', '.join(names[1:])} in place of {names[0]}" if names[1:] else ""
        raise UserError(f"{setting} is a file: name the function in it, {given}:{names[0]}{others}")


def _is_callable(value: Any) -> bool:
    return inspect.isfunction(value) or inspect.isclass(value)


def functions_of(module: ModuleType, kinds: Callable[[Any], bool] = inspect.isfunction) -> list[str]:
    """Return the names of public functions, or public objects that `kinds` accepts, which the module itself defines."""
    public = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return [name for name, value in public if kinds(value) and value.__module__ == module.__name__]


def describe(error: BaseException, file: str | None) -> str:
    """Return an error's type and message and, if it passed through `file`, the line there, as one line of text. It has
    the way out if the message names an environment variable that is hidden from this process."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" ({Path(file).name}:{lines[-1]})" if file and lines else ""
    message = " ".join(str(error).split())
    message = message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]}..."
    hidden = [name for name in os.environ.get(HIDDEN_VARIABLES, "").split(",") if name and name in message]
    hint = f" ({hidden[0]} is hidden from this process: list it in scoring.secrets)" if hidden else ""
    return f"{type(error).__name__}: {message}".removesuffix(": ") + place + hint


def _import_file(path: Path) -> ModuleType:
    """Import a file. The module's name depends only on its path, so that objects it defines can be pickled."""
    name = f"hybrid_grpo_reward_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _first_on_path(path.parent):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # it may be that of a run, which is only read
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes
        with suppress(ValueError):  # the imported code may have rearranged the path
            sys.path.remove(str(folder))
