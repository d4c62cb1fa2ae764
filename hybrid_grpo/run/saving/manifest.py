"""The manifest of a checkpoint: a record of its files, so that damage is found before any of them is loaded.

The manifest is written last. A checkpoint without one was not finished; a checkpoint whose files differ from its
manifest is damaged or mixed with another.
"""

import json
import re
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybrid_grpo.records.files import replace_text

NAME = "manifest.json"
_OF_RANK = re.compile(r"_(\d+)_of_\d+\.")


class Damaged(Exception):
    """Raised if a checkpoint is damaged; the message says what is wrong, and with which file."""


@dataclass(frozen=True)
class Manifest:
    """Describes a checkpoint and lists its files."""

    run: str
    """Identity of the run, the same in all its checkpoints."""
    step: int
    """Number of steps that were done."""
    ranks: int
    """Number of ranks that wrote the checkpoint."""
    stage: int
    """ZeRO stage with which the checkpoint was written."""
    settings: dict[str, Any]
    """Settings of the run, by their dotted names."""
    files: dict[str, list[int]]
    """Size in bytes and CRC-32 of every file, by its path in the checkpoint."""
    inputs: dict[str, str] = field(default_factory=dict)
    """Fingerprints of what the run reads, by their names in messages; see run/fingerprints.py."""
    rollbacks: int = 0
    """How often the run had gone back to a checkpoint."""
    lr_scale: float | None = None
    """Factor on learning rates from here on, if the run went back to this checkpoint; otherwise None."""
    note: str = ""
    """Why the run went back to this checkpoint; empty if it did not."""

    def write(self, folder: Path) -> None:
        content = asdict(self)
        replace_text(folder / NAME, json.dumps({"crc32": _checksum(content), "checkpoint": content}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a manifest. Raise Damaged if it is missing or unreadable, or its step differs from the folder's name."""
        try:
            document = json.loads((folder / NAME).read_bytes())
            content = document["checkpoint"]
            if document["crc32"] != _checksum(content):
                raise Damaged(f"{NAME} is damaged: its checksum differs")
            manifest = cls(**content)
        except FileNotFoundError:
            raise Damaged(f"{NAME} is missing: the checkpoint is unfinished, or from an older version") from None
        except OSError as error:
            raise Damaged(f"{NAME} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Damaged(f"{NAME} is damaged: it is not a manifest") from error
        if folder.name != (tag := f"step_{manifest.step:06d}"):
            raise Damaged(f"{NAME} belongs to {tag}")
        return manifest

    def check(self, folder: Path, rank: int, ranks: int) -> list[Path]:
        """Compare a rank's share of the files with the manifest; return their paths. Raise Damaged if any differs."""
        share = [name for name in self.files if owner(name) % ranks == rank]
        for name in share:
            size, crc32 = self.files[name]
            try:
                found = (folder / name).stat().st_size
                if found != size:
                    raise Damaged(f"{name} has {found} bytes, {size} were written")
                if measure(folder / name)[1] != crc32:
                    raise Damaged(f"{name} is not what was written: its checksum differs")
            except FileNotFoundError:
                raise Damaged(f"{name} is missing") from None
            except OSError as error:
                raise Damaged(f"{name} cannot be read: {error.strerror}") from error
        return [folder / name for name in share]


def owner(name: str) -> int:
    """Return the rank that wrote a file, which the file's name contains; 0 if there is no rank in the name."""
    found = _OF_RANK.search(name)
    return int(found[1]) if found else 0


def measure(path: Path) -> list[int]:
    size = crc32 = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            size, crc32 = size + len(block), zlib.crc32(block, crc32)
    return [size, crc32]


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
