"""What the numbers of a benchmark were measured on."""

import os
import platform
from importlib.metadata import version
from typing import Any

PACKAGES = ("torch", "deepspeed", "transformers")


def machine(*packages: str, **more: Any) -> dict[str, Any]:
    """The cores, and the versions of Python, of PACKAGES and of some others."""
    versions = {package: version(package) for package in (*PACKAGES, *packages)}
    return {"cores": os.cpu_count(), "python": platform.python_version(), **versions, **more}
