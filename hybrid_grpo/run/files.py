"""Files that a reader, or a kill, never finds half written."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file so that whoever reads it sees the old text or the new one, and a crash leaves either."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
