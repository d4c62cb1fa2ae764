"""What the numbers of a benchmark were measured on, and what benchmarks have in common on the command line."""

import argparse
import json
import os
import platform
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "deepspeed", "transformers")


def machine(*packages: str, **more: Any) -> dict[str, Any]:
    """The cores, and the versions of Python, of PACKAGES and of some others."""
    versions = {package: version(package) for package in (*PACKAGES, *packages)}
    return {"cores": os.cpu_count(), "python": platform.python_version(), **versions, **more}


def parser_of(doc: str | None, docs: bool = False) -> argparse.ArgumentParser:
    """A command line with `--json FILE` and, if asked for, `--docs FILE`."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the numbers")
    if docs:
        parser.add_argument("--docs", type=Path, metavar="FILE", help="page whose table is replaced")
    return parser


def save(file: Path | None, found: Any) -> None:
    """Write results to the file of `--json`, if one was named."""
    if file is not None:
        file.write_text(json.dumps(found, indent=2, default=str) + "\n")


def chosen(parser: argparse.ArgumentParser, setting: str, given: str, known: Collection[str]) -> tuple[str, ...]:
    """The names that were given, separated by commas; ends the program if one is not known."""
    names = tuple(given.split(","))
    if unknown := set(names).difference(known):
        parser.error(f"--{setting}: {', '.join(sorted(unknown))} not known; there are {', '.join(known)}")
    return names
