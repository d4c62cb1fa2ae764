"""Fingerprints of files, and of the models in them, which show whether they have changed.

A file of up to 64 MiB is read whole. Of a larger safetensors file, the header and a block of 4 KiB from the middle of
every tensor are read; of another large file, 1,024 evenly spaced blocks. This takes seconds for a large model. Models
with the same shapes but different weights differ in these blocks. A change outside them goes unnoticed.
"""

import json
import struct
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from transformers.utils import cached_file

_WHOLE_BYTES, _BLOCK_BYTES, _BLOCKS = 64 << 20, 4096, 1024
_PARTS = {
    "weights": ("*.safetensors", "pytorch_model*.bin"),
    "configuration": ("config.json", "generation_config.json"),
    "tokenizer": (
        *("tokenizer*", "vocab.*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template.*"),
        *("*.model", "*.tiktoken"),
    ),
}


def of_model(name: str) -> dict[str, str]:
    """Return fingerprints of a model's weights, configuration and tokenizer, from a folder or the hub's cache."""
    try:
        config = cached_file(name, "config.json", local_files_only=True)
    except OSError:
        return {}
    folder = Path(config or name).parent
    parts = {part: sorted({path for glob in globs for path in folder.glob(glob)}) for part, globs in _PARTS.items()}
    return {part: of_texts(map(of_file, files)) for part, files in parts.items() if files}


def of_file(path: Path) -> str:
    """Return the fingerprint of a file: its name, size and digest."""
    size = path.stat().st_size
    seen = blake2b(digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            seen.update(file.read())
        else:
            # Where the tensors of a safetensors file begin; 0 if it is not one.
            start = 8 + struct.unpack("<Q", file.read(8))[0] if path.suffix == ".safetensors" else 0
            start = start if start < size else 0
            header = file.read(start - 8) if start else b""
            seen.update(header)
            for offset in _offsets(header, start, size):
                file.seek(offset)
                seen.update(file.read(_BLOCK_BYTES))
    return f"{path.name} {size} {seen.hexdigest()}"


def of_texts(texts: Iterable[str]) -> str:
    """Return one fingerprint for several texts; their order matters."""
    seen = blake2b(digest_size=16)
    for text in texts:
        encoded = text.encode(errors="surrogatepass")
        seen.update(b"%d " % len(encoded) + encoded)
    return seen.hexdigest()


def _offsets(header: bytes, start: int, size: int) -> list[int]:
    """Offsets of the blocks to read."""
    try:
        tensors = (entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__")
        ranges = [(int(first), int(end)) for first, end in tensors]
        return sorted(start + max(first, (first + end - _BLOCK_BYTES) // 2) for first, end in ranges)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [size * block // _BLOCKS for block in range(_BLOCKS)]
